"""A tensor over all experts of which a rank has some: carried, saved, refused where it does not belong."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch

from moeclipse.core.errors import ConfigError
from moeclipse.moe.experts.two_projections import Experts
from moeclipse.moe.experts.weight_init import WeightInit
from moeclipse.moe.own_loop.shards import ExpertPlace, ExpertShards, rebuild_shards
from moeclipse.tensor.cut import Cut

CUT = Cut.of((6, 4), 0, index=1, parts=3, blocks=2)
COLUMNS = Cut.of((4, 3), 1, index=0, parts=3)


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)


@pytest.mark.parametrize(
    ("experts", "cut", "shape"),
    [
        ((3, 0), None, (6, 4)),
        ((1, -1, 2), None, (5,)),
        ((3, 0), CUT, (6, 4)),
        ((2,), COLUMNS, (4, 3)),
        ((), None, (2,)),
    ],
)
def test_what_is_picked_goes_back_to_its_place(experts: Any, cut: Cut | None, shape: Any) -> None:
    place = ExpertPlace(experts=experts, num_experts=4, cut=cut)
    logical = 1 + numbers(4, *shape)
    local = place.pick(logical)
    back = torch.zeros_like(logical)
    place.put(local, back)
    here = back != 0
    assert torch.equal(back[here], logical[here])
    assert here.sum() == sum(piece.numel() for _, piece in place.pieces(local))
    assert set(here.flatten(1).any(1).nonzero().flatten().tolist()) == {e for e in experts if e >= 0}
    assert ExpertShards(local, place).shape == logical.shape


def test_a_gated_part_is_two_chunks_of_each_expert() -> None:
    place = ExpertPlace(experts=(3,), num_experts=4, cut=CUT)
    shards = ExpertShards(place.pick(numbers(4, 6, 4)), place)
    found = [(tuple(c.offsets), tuple(c.sizes)) for c in shards.__create_chunk_list__()]
    assert found == [((3, 1, 0), (1, 1, 4)), ((3, 4, 0), (1, 1, 4))]


def test_it_is_carried_as_tensors_are() -> None:
    place = ExpertPlace(experts=(2, 0), num_experts=4, cut=COLUMNS)
    shards = ExpertShards(place.pick(numbers(4, 4, 3)), place)
    for alike in (shards.detach(), shards.clone(), copy.deepcopy(shards), shards.to(torch.float32).double()):
        assert isinstance(alike, ExpertShards)
        assert alike.place == place
        assert torch.equal(alike, shards)
    file = io.BytesIO()
    torch.save({"up": shards}, file)
    file.seek(0)
    with torch.serialization.safe_globals([rebuild_shards]):
        loaded = torch.load(file, weights_only=True)["up"]
    assert torch.equal(loaded, shards)
    zeros = torch.zeros_like(shards)
    zeros.copy_(shards)
    assert torch.equal(zeros.local, shards.local)
    assert shards.detach().local.data_ptr() == shards.local.data_ptr(), "views, not copies"
    assert "experts [2, 0] of 4, 0 to 0 of their width" in repr(shards)


def test_it_computes_nothing() -> None:
    shards = ExpertShards(numbers(1, 2), ExpertPlace(experts=(2,), num_experts=4))
    with pytest.raises(NotImplementedError, match=r"this rank has experts \[2\] of 4; take its \.local"):
        shards + 1
    other = ExpertShards(numbers(1, 2), ExpertPlace(experts=(1,), num_experts=4))
    with pytest.raises(NotImplementedError, match="knows nothing"):
        shards.copy_(other)
    for wrong in (
        lambda: torch.zeros(4, 2, dtype=torch.float64).copy_(shards),
        lambda: torch.stack([shards, other]),
        shards.untyped_storage,
    ):
        with pytest.raises(NotImplementedError, match=r"experts \[2\] of 4"):
            wrong()


def built(ids: tuple[int, ...], seed: int = 0) -> Experts:
    init = WeightInit(dtype=torch.float64, seed=seed)
    return Experts(ids, d_model=4, d_ff=3, init=init, num_experts=6, bias=True)


def test_experts_refuse_those_of_another_rank() -> None:
    first, second = built((0, 1)), built((2, 3))
    with pytest.raises(
        RuntimeError, match=r"up was saved by a rank with experts \[0, 1\] of 6, but this rank has"
    ):
        second.load_state_dict(first.state_dict())
    again = built((2, 3), seed=1)
    again.load_state_dict(second.state_dict())
    assert torch.equal(again.up, second.up)


def test_experts_take_their_own_from_all() -> None:
    every, some = built((0, 1, 2, 3, 4, 5)), built((4, 1), seed=1)
    state = every.state_dict()
    assert not any(isinstance(value, ExpertShards) for value in state.values()), "all are here: plain tensors"
    some.load_state_dict(state)
    assert torch.equal(some.up, every.up[[4, 1]])
    assert torch.equal(some.down, every.down[[4, 1]])


def test_plain_tensors_of_release_0_1_are_taken_at_their_word() -> None:
    old, new = built((4, 1)), built((4, 1), seed=1)
    new.load_state_dict({name: value.local for name, value in old.state_dict().items()})
    assert torch.equal(old.up, new.up)


def test_what_fits_nowhere_is_refused_by_torch() -> None:
    experts = built((4, 1))
    with pytest.raises(RuntimeError, match="size mismatch for up"):
        experts.load_state_dict({"up": numbers(3, 6, 4)}, strict=False)


def test_a_place_says_what_it_wants() -> None:
    place = ExpertPlace(experts=(1,), num_experts=4)
    other = ExpertShards(numbers(1, 2), ExpertPlace(experts=(2,), num_experts=4))
    with pytest.raises(ConfigError, match=r"or with torch\.distributed\.checkpoint"):
        place.take(other, "w")
