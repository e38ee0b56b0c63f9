"""Programs of whole steps with made-up launches, for tests."""

from __future__ import annotations

from moeclipse.schedule import kinds
from moeclipse.schedule.catalogue import build
from moeclipse.schedule.launch import BucketShape, HostedLaunch, StepShape
from moeclipse.schedule.op import Program
from moeclipse.schedule.shape import LayerShape, Recompute
from moeclipse.schedule.templates import Expansion, expand

SCHEDULES = {
    "pp1": (1, 1),
    "gpipe": (2, 1),
    "1f1b": (2, 1),
    "1f1b-pairs": (2, 1),
    "vpp": (2, 2),
    "vpp+1": (2, 2),
    "zb-h1": (2, 1),
    "zb-v": (2, 2),
    "dualpipev": (2, 2),
    "dualpipe": (2, 2),
}


def launches(layer: int) -> tuple[HostedLaunch, ...]:
    return (
        HostedLaunch(kinds.LOADS_F, kinds.ROUTE_F, "stage", f"loads, layer {layer}", once=True),
        HostedLaunch(kinds.SIZES_F, kinds.ROUTE_F, "experts", f"sizes, layer {layer}"),
        HostedLaunch(kinds.SCORES_F, kinds.DISPATCH_F, "experts", f"scores, layer {layer}", ahead=True),
        HostedLaunch(kinds.SCORES_B, kinds.DISPATCH_B, "experts", f"score gradients, layer {layer}"),
        HostedLaunch(kinds.TENSOR_F, kinds.ATTN_F, "tensor", "gather", ahead=True),
        HostedLaunch(kinds.TENSOR_F, kinds.ATTN_F, "tensor", "sum"),
        HostedLaunch(kinds.TENSOR_R, kinds.ATTN_R, "tensor", "gather", ahead=True),
        HostedLaunch(kinds.TENSOR_B, kinds.ATTN_B, "tensor", "gather", ahead=True),
        HostedLaunch(kinds.TENSOR_B, kinds.ATTN_B, "tensor", "sum"),
        HostedLaunch(kinds.TENSOR_F, kinds.SEND_F, "tensor", "tokens", ahead=True),
    )


def whole(
    name: str,
    overlap: str = "off",
    recompute: Recompute = "off",
    *,
    tied: bool = False,
    chunks: int = 2,
    copies: tuple[int, int, int] = (2, 2, 2),
    slots: int = 0,
    by_layer: bool = False,
    next_forward: bool = False,
    inputs: float = 0.0,
) -> Program:
    """Two layers a stage, four microbatches; `copies` are dp, ep and tp. `slots`: state is on the host;
    `inputs`: so are those of all layers but the last, so many bytes each."""
    ranks, per_rank = SCHEDULES[name]
    actions = build(name, ranks, 4, per_rank)
    placement = actions.pipeline().placement
    rank_of, per_copy = placement.rank_of, placement.stages_per_chain
    last = len(rank_of) - 1
    layers = [
        [
            LayerShape(
                launches=launches(2 * (stage % per_copy) + at),
                recompute=recompute,
                head=placement.next_stage(stage) is None and at == 1,
                host_bytes=0.0 if placement.next_stage(stage) is None and at == 1 else inputs,
            )
            for at in range(2)
        ]
        for stage in range(len(rank_of))
    ]
    buckets = tuple(
        tuple(
            BucketShape(
                f"{stage}.{at}",
                "dense_grads",
                ((stage, at),),
                tied=tied and stage in (0, last),
                num_bytes=4e6,
                host_bytes=8e6 if slots else 0.0,
                layer=f"{stage}.{at}",
            )
            for stage in sorted(range(len(rank_of)), key=lambda stage: -(stage % per_copy))
            if rank_of[stage] == place
            for at in (1, 0)
        )
        for place in range(ranks)
    )
    dp, ep, tp = copies
    given = {"tied": tied, "slots": slots, "by_layer": by_layer, "next_forward": next_forward}
    given["input_slots"] = slots
    given["mirrored"] = placement.num_chains > 1
    step = StepShape(dp=dp, ep=ep, tp=tp, buckets=buckets, **given)
    how = Expansion(overlap=overlap, chunks=chunks, split="layer")  # type: ignore[arg-type]
    return expand(actions, layers, how, step=step)
