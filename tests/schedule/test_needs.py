"""The table of what each layer op reads, written out once more by hand."""

from __future__ import annotations

import pytest

from moeclipse.core.errors import ScheduleError
from moeclipse.schedule import kinds
from moeclipse.schedule.kinds import KINDS, Kind
from moeclipse.schedule.needs import (
    exchange_sources,
    keys_of,
    needs,
    pipeline_sources,
    resolve,
    tabulate_keys,
)
from moeclipse.schedule.op import Op, backward, forward, input_grad, pair, weight_grad
from moeclipse.schedule.shape import LayerShape, PipelineShape, Shadow, StagePlacement
from moeclipse.schedule.smart import backward_of, exchange_shape, smart


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


def keys(op: Op, shape: PipelineShape) -> list[str]:
    return [f"{stage}{kind}{microbatch}" for kind, stage, _, microbatch in needs(shape, op)]


def test_whole_actions() -> None:
    shape = PipelineShape(placement=StagePlacement.vee(2), num_microbatches=2)
    assert keys(forward(0, 1), shape) == []
    assert keys(forward(1, 1), shape) == ["1RECV_F1"]
    assert keys(forward(2, 1), shape) == ["1F1"], "the rank of the fold holds both stages"
    assert keys(backward(3, 0), shape) == ["3F0", "3F0"], "the loss is its own"
    assert keys(backward(0, 0), shape) == ["0F0", "0RECV_B0"]
    assert keys(input_grad(1, 0), shape) == ["1F0", "2B0"]
    assert keys(weight_grad(1, 0), shape) == ["1B0"]
    assert keys(pair(forward(1, 1), backward(0, 0)), shape) == ["1RECV_F1", "0F0", "0RECV_B0"]
    assert keys(Op(kind=kinds.SEND_F, stage=0, microbatch=1), shape) == ["0F1"]
    assert keys(Op(kind=kinds.SEND_B, stage=1, microbatch=1), shape) == ["1B1"]
    assert keys(Op(kind=kinds.RECV_F, stage=1, microbatch=1), shape) == []
    assert keys(Op(kind=kinds.REDUCE, stage=1), shape) == ["1W0", "1W1"]


def test_names_that_an_action_answers_to() -> None:
    """Whoever wants a gradient of the input takes it from B or from I, that of the weights from B or W."""
    made = (forward(0, 0), backward(0, 0), input_grad(0, 0), weight_grad(0, 0))
    answered = {str(op): [str(kind) for kind, *_ in keys_of(op)] for op in made}
    assert answered == {"0F0": ["F"], "0B0": ["B", "W"], "0I0": ["B"], "0W0": ["W"]}
    assert keys_of(pair(forward(0, 1), backward(2, 0))) == [
        (kinds.F, 0, None, 1),
        (kinds.B, 2, None, 0),
        (kinds.W, 2, None, 0),
    ]


def test_the_head_is_the_last_part_and_the_first_in_backward() -> None:
    layers = [LayerShape(), LayerShape(head=True)]
    assert read_by("HEAD_F", 1, layers, stage=2) == {"COMBINE_F.1", "SHARED_F.1"}
    assert read_by("HEAD_B", 1, layers, stage=2) == {"HEAD_F.1"}
    assert read_by("HEAD_W", 1, layers, stage=2) == {"HEAD_B.1"}
    assert read_by("COMBINE_B", 1, layers, stage=2) == {"HEAD_B.1"}
    assert read_by("ATTN_F", 1, [layers[1]] * 2) == {"HEAD_F.0"}


def test_a_reduction_reads_every_weight_gradient_of_its_stage() -> None:
    layers = (LayerShape(shared=False), LayerShape(moe=False))
    shape = PipelineShape(placement=StagePlacement.loop(1), num_microbatches=2, layers=(layers,))
    read = {(str(kind), layer, m) for kind, _, layer, m in needs(shape, Op(kind=kinds.REDUCE, stage=0))}
    one = {("MLP_W", 0), ("ROUTE_W", 0), ("ATTN_W", 0), ("MLP_W", 1), ("ATTN_W", 1)}
    assert read == {(kind, layer, m) for kind, layer in one for m in range(2)}


def test_equal_cuts_match_chunk_by_chunk_and_others_need_all() -> None:
    shape = PipelineShape(placement=StagePlacement.loop(1), num_microbatches=1, layers=((LayerShape(),),))

    def op(kind: Kind, chunk: int | None = None, chunks: int = 1) -> Op:
        return Op(kind=kind, stage=0, layer=0, microbatch=0, chunk=chunk, chunks=chunks)

    ops = [op(kinds.DISPATCH_F, 0, 2), op(kinds.DISPATCH_F, 1, 2)]
    table = tabulate_keys(ops)
    assert resolve(shape, op(kinds.MLP_F, 1, 2), table) == [1]
    assert resolve(shape, op(kinds.MLP_F), table) == [0, 1]
    assert resolve(shape, op(kinds.MLP_F, 0, 3), table) == [0, 1]
    with pytest.raises(ScheduleError, match=r"0.0COMBINE_F0 reads MLP_F of stage 0, microbatch 0, which its"):
        resolve(shape, op(kinds.COMBINE_F), table)


def test_positions_in_a_list() -> None:
    shape = PipelineShape(placement=StagePlacement.loop(1), num_microbatches=2)
    ops = [forward(0, 0), forward(0, 1), backward(0, 0), input_grad(0, 1), weight_grad(0, 1)]
    assert pipeline_sources(shape, ops) == [[], [], [0, 0], [1, 1], [3]]


def test_positions_in_an_exchange() -> None:
    shadow = Shadow(expert=0, owner=0, ranks=(1,))
    forth = smart(exchange_shape(2, shadows=[shadow])).ranks[0]
    assert " ".join(map(str, forth)) == "S_F@0 S_F@1 SHADOW_SEND C_F@0 R_F@0 C_F@1 R_F@1 SHADOW_F"
    assert exchange_sources(forth) == [[], [], [], [0], [3], [1], [5], [2]]
    back = smart(backward_of(exchange_shape(2), own_weights=1)).ranks[0]
    assert " ".join(map(str, back)) == "S_B@0 S_B@1 C_B@0 R_B@0 C_W@0 C_B@1 R_B@1 C_W"
    assert exchange_sources(back) == [[], [], [0], [2], [2], [1], [5], [2, 5]]
