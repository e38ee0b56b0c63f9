"""Flat buffers: which parameters share a bucket, who owns which part, and in which order they are reduced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from moeclipse.comm.mesh import Mesh
from moeclipse.moe.layer import MoE
from moeclipse.tensor.cut import Cut, mark
from moeclipse.testing.run_ranks import run_ranks
from moeclipse.train.optim.bucket_contents import BucketEntry, entries_of, logical_bytes
from moeclipse.train.optim.buckets import Bucket, Buckets


class Model(nn.Module):
    """Matrices and vectors in turn, 60 elements in all."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.arange(10.0).view(5, 2))
        self.norm = nn.Parameter(torch.arange(3.0))
        self.second = nn.Parameter(100 + torch.arange(14.0).view(7, 2))
        self.bias = nn.Parameter(torch.arange(3.0))
        self.third = nn.Parameter(200 + torch.arange(30.0).view(5, 6))
        self.fixed = nn.Parameter(torch.zeros(4), requires_grad=False)


def names(bucket: Bucket) -> list[str]:
    return [entry.name for entry in bucket.entries]


def test_matrices_and_vectors_go_apart_from_last_to_first() -> None:
    buckets = Buckets(Model(), Mesh.single(), bucket_mb=1.0)
    assert [(names(bucket), bucket.decay) for bucket in buckets] == [
        (["bias", "norm"], False),
        (["third", "second", "first"], True),
    ]


def test_a_bucket_ends_where_it_is_large_enough() -> None:
    small = 150 / 2**20  # bytes: `third` has 120, `second` 56
    found = [names(bucket) for bucket in Buckets(Model(), Mesh.single(), bucket_mb=small)]
    assert found == [["third", "second"], ["bias", "norm"], ["first"]]


def test_parameters_and_gradients_are_views() -> None:
    model = Model()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    buckets = Buckets(model, Mesh.single(), bucket_mb=1.0)
    for bucket in buckets:
        bucket.grads.copy_(torch.arange(len(bucket.grads)))
        for entry, parameter in zip(bucket.entries, bucket.parameters, strict=True):
            part = slice(entry.offset, entry.offset + entry.numel)
            assert torch.equal(parameter, before[entry.name])
            assert torch.equal(bucket.params[part], parameter.flatten())
            assert torch.equal(parameter.main_grad.flatten(), bucket.grads[part])
    buckets.zero()
    buckets.finish()
    assert all(not parameter.main_grad.any() for bucket in buckets for parameter in bucket.parameters)


def test_buckets_leave_in_one_order_whatever_backward_does(monkeypatch: pytest.MonkeyPatch) -> None:
    model, launched = Model(), []
    buckets = Buckets(model, Mesh.single(), bucket_mb=0.0)
    order = [names(bucket)[0] for bucket in buckets]
    assert order == ["third", "bias", "second", "norm", "first"]
    monkeypatch.setattr(Bucket, "launch", lambda bucket: launched.append(names(bucket)[0]))

    def done(*ready: str) -> list[str]:
        for name in ready:
            getattr(model, name).accumulation.backward_done()
        return launched

    assert done("third") == [], "nothing leaves before the last backward"
    buckets.arm(backwards=2)
    assert done("second", "second", "third") == [], "one backward of `third` is still to come"
    assert done("third") == ["third"]
    assert done("first", "first", "bias", "bias") == ["third", "bias", "second"]
    buckets.finish()
    assert launched == order, "what no backward touched leaves at the end"


def summed(mesh: Mesh) -> list[Any]:
    """Every rank's shard, as (name, first element, values), after a sum over ranks and a new weight."""
    buckets = Buckets(Model(), mesh, bucket_mb=1.0)
    for bucket in buckets:
        bucket.grads.copy_((mesh.rank + 1.0) * torch.arange(len(bucket.grads)))
    buckets.finish()
    found = []
    for bucket in buckets:
        shard = bucket.reduced()
        for segment in bucket.segments():
            values = shard[segment.offset : segment.offset + segment.length]
            found.append((segment.entry.name, segment.start, values.tolist()))
        bucket.params[bucket.shard] = -shard
    for bucket in buckets:
        bucket.publish().get()
    return [found, [bucket.params.tolist() for bucket in buckets]]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_every_element_has_one_owner_and_all_get_its_new_value(num_ranks: int) -> None:
    results = run_ranks(num_ranks, summed)
    factor = num_ranks * (num_ranks + 1) / 2
    owned = sorted(
        (name, start + i, value)
        for shards, _ in results
        for name, start, values in shards
        for i, value in enumerate(values)
    )
    offsets = {"bias": 0, "norm": 3, "third": 0, "second": 30, "first": 44}
    sizes = {"bias": 3, "norm": 3, "third": 30, "second": 14, "first": 10}
    expected = [(name, i, factor * (offsets[name] + i)) for name, size in sizes.items() for i in range(size)]
    assert owned == sorted(expected)
    for _, params in results:
        assert params == results[0][1]
        assert params[0][:6] == [-factor * i for i in range(6)]


def test_a_copy_of_another_stages_parameter_is_neither_saved_nor_counted() -> None:
    model = Model()
    model.third.is_copy = True  # type: ignore[attr-defined]
    buckets = Buckets(model, Mesh.single(), bucket_mb=1.0)
    copied = next(bucket for bucket in buckets if "third" in names(bucket))
    assert not copied.owned
    assert names(copied) == ["third"]
    assert list(copied.segments()) == []
    assert [segment.entry.name for segment in copied.segments(everything=True)] == ["third"]


def test_a_cut_tensor_speaks_of_the_logical_one() -> None:
    rows = Cut.of((8, 3), 0, index=1, parts=2, blocks=2)  # two stacked blocks of 4 rows, each cut in half
    assert list(entries_of("w", (4, 3), 5, rows)) == [
        BucketEntry(name="w", shape=(8, 3), offset=5, start=6, length=6),
        BucketEntry(name="w", shape=(8, 3), offset=11, start=18, length=6),
    ]
    columns = Cut.of((4, 6), 1, index=1, parts=3)
    (entry,) = entries_of("w", (4, 2), 0, columns)
    assert (entry.name, entry.shape, entry.numel) == ("w[:, 2:4]", (4, 2), 8)
    (entry,) = entries_of("w", (4, 6), 7, None)
    assert entry == BucketEntry(name="w", shape=(4, 6), offset=7)


def test_buckets_end_at_the_same_place_on_every_part() -> None:
    """Parts of 3 and 2 rows: a limit in local bytes would cut buckets differently from rank to rank."""
    sizes = []
    for index in range(2):
        cut = Cut.of((5, 4), 0, index=index, parts=2)
        parameter = nn.Parameter(torch.zeros(cut.local_shape, dtype=torch.bfloat16))
        sizes.append(logical_bytes(mark(parameter, cut)))
    assert sizes == [5 * 4 * 4] * 2, "of the whole gradient, in the type of the sum"


def experts(mesh: Mesh) -> list[Any]:
    moe = MoE(4, 6, 5, mesh=mesh, layer=1)
    buckets = Buckets(moe, mesh, bucket_mb=1.0)
    return [
        [segment.entry.name for segment in bucket.segments()]
        for bucket in buckets
        if bucket.name.startswith("experts.")
    ]


def test_experts_are_owned_whole_by_one_of_their_copies() -> None:
    """dp 2: each rank's experts are shared by two copies, and each is stepped for by one of them."""
    results = run_ranks(4, experts, dp=2)
    for tensors in zip(*results, strict=True):
        owned = [name for rank in tensors for name in rank]
        assert len(owned) == len(set(owned)) == 5
        assert {name.split(".")[1] for name in owned} == set("01234")
        assert all(rank for rank in tensors), "the work is spread"


def test_buckets_of_experts_may_come_from_elsewhere() -> None:
    made = []

    def make(parameter: nn.Parameter, name: str, layer: MoE, key: str) -> None:
        made.append((name, key, tuple(parameter.shape)))

    moe = MoE(4, 6, 5, layer=1)
    Buckets(moe, Mesh.single(), 1.0, "off", make)
    assert {shape[0] for *_, shape in made} == {5}
    assert len(made) == len(list(moe.experts.parameters()))
