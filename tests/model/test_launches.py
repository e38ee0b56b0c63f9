"""What layers say that they launch; that they do launch it is shown in train/predict/test_step_program."""

from __future__ import annotations

from typing import Any

from moeclipse.core.config import with_values
from moeclipse.model.launches import LayerLaunches
from moeclipse.schedule import kinds
from moeclipse.schedule.kinds import Kind
from moeclipse.schedule.launch import HostedLaunch
from moeclipse.train.config import TrainConfig

MODEL: dict[str, Any] = {"model.num_layers": 3, "model.num_dense_layers": 1}


def launches(
    dp: int = 1,
    ep: int = 1,
    tp: int = 1,
    *,
    parts_tokens: bool = True,
    replicas: bool = False,
    **changes: Any,
) -> list[tuple[HostedLaunch, ...]]:
    config = with_values(TrainConfig(), {**MODEL, **changes})
    mine = LayerLaunches(
        model=config.model,
        moe=config.moe,
        gate=config.gate,
        dp=dp,
        ep=ep,
        tp=tp,
        parts_tokens=parts_tokens and tp > 1,
        replicas=replicas,
    )
    return mine.of([range(2), range(2, 3)], (0, 1))


def words(layer: tuple[HostedLaunch, ...], host: Kind) -> list[str]:
    ahead = [launch.what for launch in layer if launch.host is host and launch.ahead]
    return [*ahead, "*", *(launch.what for launch in layer if launch.host is host and not launch.ahead)]


def test_one_rank_launches_nothing() -> None:
    assert launches() == [(), (), ()]


def test_data_ranks_tell_each_other_loads_and_expert_ranks_sizes_and_scores() -> None:
    dense, sparse, _ = launches(dp=2)
    assert dense == ()
    assert [launch.kind for launch in sparse] == [kinds.LOADS_F]
    _, sparse, _ = launches(ep=2)
    assert [launch.kind for launch in sparse] == [
        kinds.LOADS_F,
        kinds.SIZES_F,
        kinds.SCORES_F,
        kinds.SCORES_B,
    ]
    assert {launch.axis for launch in sparse} == {"stage", "experts"}


def test_capacity_and_shadows_ask_for_counts() -> None:
    _, sparse, _ = launches(ep=2, **{"gate.capacity_factor": 1.0, "moe.shadow": (0,)})
    assert words(sparse, kinds.ROUTE_F) == [
        "exchange of capacity counts, layer 1",
        "*",
        "sum of expert loads, layer 1",
        "exchange of counts, layer 1",
        "exchange of sizes, layer 1",
    ]
    assert words(sparse, kinds.ROUTE_R) == ["exchange of capacity counts, layer 1", "*"]


def test_routing_waits_for_the_loads_that_replicas_share_rows_by() -> None:
    _, plain, _ = launches(ep=2)
    _, shared, _ = launches(ep=2, replicas=True)
    assert [launch.what for launch in shared] == [launch.what for launch in plain]
    assert (plain[0].kind, plain[0].once) == (kinds.LOADS_F, True)
    assert (shared[0].kind, shared[0].once) == (kinds.COUNTS_F, False)
    assert shared[0].kind in kinds.AWAITED


def test_linears_over_tp() -> None:
    dense, sparse, last = launches(tp=2)
    assert words(dense, kinds.ATTN_F) == [
        "reduce-scatter of embeddings",
        "gather of inputs, queries, keys and values, layer 0",
        "*",
        "reduce-scatter of outputs, o, layer 0",
    ]
    assert words(dense, kinds.ATTN_R) == words(dense, kinds.ATTN_F)[1:]
    assert words(dense, kinds.MLP_B)[0] == "backward gather of outputs, down, layer 0"
    assert words(sparse, kinds.MLP_F) == ["*"]
    assert words(last, kinds.HEAD_F) == ["gather of inputs, head", "*", "exchange of loss statistics"]


def test_tokens_of_experts_come_back_where_the_output_is_read() -> None:
    """Layer 1 ends a stage: who sends its output launches; layer 2 begins one, and reads what was sent."""
    back = "tokens of experts, layer {}"
    dense, sparse, last = launches(tp=2, parts_tokens=False)
    assert words(sparse, kinds.SEND_F) == [back.format(1), "*"]
    assert back.format(1) not in words(last, kinds.ATTN_F)
    assert words(last, kinds.HEAD_F)[0] == back.format(2)
    assert words(dense, kinds.SEND_F) == ["*"]
    folded = launches(tp=2)
    assert not [launch for layer in folded for launch in layer if "tokens of experts" in launch.what]
    sharded = launches(tp=2, **{"moe.expert_tp": "sharded"})
    assert words(sharded[1], kinds.COMBINE_B) == [f"backward of {back.format(1)}", "*"]
    assert sharded[1][0].axis == "tensor"
