"""Where stages live, what layers hold, who exchanges rows with whom."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from moeclipse.core.errors import ScheduleError
from moeclipse.schedule.kinds import Part
from moeclipse.schedule.shape import (
    RECOMPUTED,
    Activation,
    LayerShape,
    PipelineShape,
    StagePlacement,
    even_groups,
)
from moeclipse.schedule.smart import exchange_shape, natural_units


def test_even_groups_leave_a_ragged_last_one() -> None:
    assert even_groups(7, 3) == ((0, 1, 2), (3, 4, 5), (6,))
    assert even_groups(2, 8) == ((0, 1),)


def test_every_row_has_one_step_and_both_ends_agree() -> None:
    """Over all steps a rank sends to every rank once, and whoever it sends to receives at the same step."""
    for P, size in [(6, 4), (3, 2), (12, 8), (7, 3), (1, 1)]:
        shape = exchange_shape(P, group_size=size)
        for rank in range(P):
            targets = [t for step in range(shape.num_steps) for t in shape.send_to(rank, step)]
            assert sorted(targets) == list(range(P))
            for step in range(shape.num_steps):
                for target in shape.send_to(rank, step):
                    assert rank in shape.receive_from(target, step)


def test_placements() -> None:
    loop, vee, dual = StagePlacement.loop(3, 2), StagePlacement.vee(3), StagePlacement.dual(3)
    assert loop.rank_of == (0, 1, 2, 0, 1, 2)
    assert vee.rank_of == dual.rank_of == (0, 1, 2, 2, 1, 0)
    assert loop.stages_of(1) == vee.stages_of(1) == (1, 4)
    assert (loop.stages_of(0), vee.stages_of(0)) == ((0, 3), (0, 5))
    assert [vee.next_stage(s) for s in range(6)] == [1, 2, 3, 4, 5, None]
    assert [dual.next_stage(s) for s in range(6)] == [1, 2, None, 4, 5, None]
    assert [dual.previous_stage(s) for s in range(6)] == [None, 0, 1, None, 3, 4]
    assert (dual.stages_per_chain, vee.stages_per_chain) == (3, 6)
    assert StagePlacement.folded(3, 3).rank_of == (0, 1, 2, 2, 1, 0, 0, 1, 2)
    assert StagePlacement.folded(3, 2) == vee


def test_chains_share_the_microbatches() -> None:
    both = PipelineShape(placement=StagePlacement.dual(2), num_microbatches=6)
    assert [both.microbatches_of(stage).start for stage in range(4)] == [0, 0, 3, 3]
    assert {len(both.microbatches_of(stage)) for stage in range(4)} == {3}
    one = PipelineShape(placement=StagePlacement.vee(2), num_microbatches=6)
    assert {one.microbatches_of(stage) for stage in range(4)} == {range(6)}


def test_both_chains_begin_with_the_first_layer() -> None:
    uneven = tuple((LayerShape(),) * count for count in (2, 1, 2, 1))
    both = PipelineShape(placement=StagePlacement.dual(2), num_microbatches=4, layers=uneven)
    assert both.first_layers == [0, 2, 0, 2]
    one = PipelineShape(placement=StagePlacement.vee(2), num_microbatches=4, layers=uneven)
    assert one.first_layers == [0, 2, 3, 5]


def names(parts: Sequence[Part]) -> str:
    return " ".join(part.name for part in parts)


def test_parts_of_layers() -> None:
    assert names(LayerShape().parts) == "ATTN ROUTE SHARED DISPATCH MLP COMBINE"
    assert names(LayerShape(shared=False, head=True).parts) == "ATTN ROUTE DISPATCH MLP COMBINE HEAD"
    assert names(LayerShape(moe=False).parts) == "ATTN MLP"


def test_what_runs_again_is_what_the_layer_has() -> None:
    again = {name: names(LayerShape(recompute=name).recomputed) for name in RECOMPUTED}  # type: ignore[arg-type]
    assert again == {
        "off": "",
        "attn": "ATTN",
        "mlp": "SHARED MLP",
        "moe": "ROUTE SHARED DISPATCH MLP",
        "full": "ATTN ROUTE SHARED DISPATCH MLP",
    }
    assert names(LayerShape(moe=False, recompute="full").recomputed) == "ATTN MLP"
    with pytest.raises(ScheduleError, match="recompute \\('some'\\) must be one of 'off', 'attn'"):
        LayerShape(recompute="some")  # type: ignore[arg-type]


def test_activations_of_a_layer_add_up() -> None:
    """A dense block keeps in MLP what a MoE layer keeps in MLP and SHARED."""
    size = Activation(input=1, attn=2, shared=4, mlp=8, head=16)
    moe, dense = LayerShape(activation=size), LayerShape(moe=False, activation=size)
    assert sum(moe.kept.get(part, 0.0) for part in moe.parts) == 2 + 4 + 8
    assert sum(dense.kept.get(part, 0.0) for part in dense.parts) == 2 + 8 + 4
    last = LayerShape(head=True, activation=size)
    assert sum(last.kept.get(part, 0.0) for part in last.parts) == 2 + 4 + 8 + 16
    whole = Activation()
    assert whole.input + whole.attn + whole.shared + whole.mlp == pytest.approx(1.0)


def test_chunks_of_an_exchange() -> None:
    shape = exchange_shape(4, chunks=2, units=natural_units(4, 2, 3))
    assert (shape.own_chunks, shape.chunks, shape.most_chunks) == (3, 2, 3)
    assert [shape.chunks_of(step) for step in range(4)] == [3, 2, 2, 2]
    assert shape.keeps_own_rows
    assert not exchange_shape(4, group_size=2).keeps_own_rows
    assert (shape.num_ranks, shape.num_steps) == (4, 4)


def test_a_rank_belongs_to_one_group() -> None:
    shape = exchange_shape(5, group_size=2)
    assert [shape.group_of(rank) for rank in range(5)] == [0, 0, 1, 1, 2]
    with pytest.raises(ScheduleError, match=r"rank 5 is in none of the 3 groups; expected 0..4"):
        shape.group_of(5)
    with pytest.raises(ScheduleError, match=r"num_ranks \(0\) and group_size \(1\) must be at least 1"):
        even_groups(0, 1)
