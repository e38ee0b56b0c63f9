"""The table of what each layer op reads, written out once more by hand."""

from __future__ import annotations

import pytest

from moeclipse.schedule.kinds import KINDS
from moeclipse.schedule.needs import needs
from moeclipse.schedule.op import Op
from moeclipse.schedule.shape import LayerShape, PipelineShape, StagePlacement


def read_by(
    kind: str,
    layer: int | None,
    layers: list[LayerShape],
    stage: int = 1,
    placement: StagePlacement | None = None,
) -> set[str]:
    """`kind.layer` (or `stage:kind`) of everything the op reads, in a pipeline of three stages."""
    place = placement or StagePlacement.loop(3)
    shape = PipelineShape(placement=place, num_microbatches=1, layers=(tuple(layers),) * 3)
    op = Op(kind=KINDS[kind], stage=stage, layer=layer, microbatch=0)
    return {
        f"{key[0]}.{key[2]}" if key[1] == stage and key[2] is not None else f"{key[1]}:{key[0]}"
        for key in needs(shape, op)
    }


TWO = [LayerShape(), LayerShape()]


@pytest.mark.parametrize(
    ("kind", "layer", "expected"),
    [
        ("ATTN_F", 0, {"1:RECV_F"}),
        ("ATTN_F", 1, {"COMBINE_F.0", "SHARED_F.0"}),
        ("ROUTE_F", 1, {"ATTN_F.1"}),
        ("SHARED_F", 1, {"ATTN_F.1"}),
        ("DISPATCH_F", 1, {"ROUTE_F.1"}),
        ("MLP_F", 1, {"DISPATCH_F.1"}),
        ("COMBINE_F", 1, {"MLP_F.1"}),
        ("COMBINE_B", 1, {"1:RECV_B"}),
        ("COMBINE_B", 0, {"ATTN_B.1"}),
        ("SHARED_B", 0, {"ATTN_B.1", "SHARED_F.0"}),
        ("MLP_B", 0, {"COMBINE_B.0", "MLP_F.0"}),
        ("DISPATCH_B", 0, {"MLP_B.0"}),
        ("ROUTE_B", 0, {"DISPATCH_B.0", "ROUTE_F.0"}),
        ("ATTN_B", 0, {"ROUTE_B.0", "SHARED_B.0", "ATTN_F.0"}),
        ("ATTN_W", 0, {"ATTN_B.0"}),
        ("ROUTE_W", 0, {"ROUTE_B.0"}),
        ("SHARED_W", 0, {"SHARED_B.0"}),
        ("MLP_W", 0, {"MLP_B.0"}),
    ],
)
def test_a_moe_layer_with_shared_experts(kind: str, layer: int, expected: set[str]) -> None:
    assert read_by(kind, layer, TWO) == expected


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("MLP_F", {"ATTN_F.0"}),
        ("MLP_B", {"1:RECV_B", "MLP_F.0"}),
        ("ATTN_B", {"MLP_B.0", "ATTN_F.0"}),
    ],
)
def test_a_dense_layer(kind: str, expected: set[str]) -> None:
    assert read_by(kind, 0, [LayerShape(moe=False)]) == expected


def test_without_shared_experts() -> None:
    layers = [LayerShape(shared=False)] * 2
    assert read_by("ATTN_F", 1, layers) == {"COMBINE_F.0"}
    assert read_by("ATTN_B", 1, layers) == {"ROUTE_B.1", "ATTN_F.1"}


@pytest.mark.parametrize(
    ("recompute", "kind", "expected"),
    [
        ("full", "ATTN_R", {"ATTN_F.0"}),
        ("full", "ROUTE_R", {"ATTN_R.0"}),
        ("full", "SHARED_R", {"ATTN_R.0"}),
        ("full", "DISPATCH_R", {"ROUTE_R.0"}),
        ("full", "MLP_R", {"DISPATCH_R.0"}),
        ("full", "MLP_B", {"MLP_R.0", "COMBINE_B.0"}),
        ("full", "ATTN_B", {"ATTN_R.0", "ROUTE_B.0", "SHARED_B.0"}),
        ("moe", "ROUTE_R", {"ATTN_F.0"}),
        ("mlp", "MLP_R", {"DISPATCH_F.0"}),
        ("attn", "MLP_B", {"MLP_F.0", "COMBINE_B.0"}),
    ],
)
def test_recompute(recompute: str, kind: str, expected: set[str]) -> None:
    assert read_by(kind, 0, [LayerShape(recompute=recompute)]) == expected  # type: ignore[arg-type]


def test_ends_of_the_model_and_neighbours_on_one_rank() -> None:
    assert read_by("ATTN_F", 0, TWO, stage=0) == set()
    assert read_by("COMBINE_B", 1, TWO, stage=2) == {"COMBINE_F.1", "SHARED_F.1"}  # the loss
    folded = StagePlacement(num_ranks=2, rank_of=(0, 1, 1))
    assert read_by("ATTN_F", 0, TWO, stage=2, placement=folded) == {"1:COMBINE_F", "1:SHARED_F"}
    assert read_by("COMBINE_B", 1, TWO, stage=1, placement=folded) == {"2:ATTN_B"}
    assert read_by("SEND_F", None, TWO) == {"COMBINE_F.1", "SHARED_F.1"}
    assert read_by("SEND_B", None, TWO) == {"ATTN_B.0"}
