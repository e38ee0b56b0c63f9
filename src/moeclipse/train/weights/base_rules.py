"""What adapters, and a base in few bits beside them, cannot go with, told before ranks start."""

from __future__ import annotations

from collections.abc import Iterator

from moeclipse.balance.config import PlacementConfig
from moeclipse.model.config import ModelConfig
from moeclipse.model.lora_config import LATENT, PROJECTIONS, LoraConfig
from moeclipse.moe.config import MoEConfig

BASE_KEYS = (
    *("model.base", "model.dense_base", "lora.rank", "moe.d_ff", "moe.shadow", "moe.expert_tp"),
    *("model.d_model", "model.d_ff", "model.num_heads", "model.num_kv_heads", "model.head_dim"),
    *("model.q_lora_rank", "model.kv_lora_rank", "model.qk_nope_head_dim", "model.qk_rope_head_dim"),
    *("model.v_head_dim", "moe.shared_d_ff", "moe.num_shared_experts", "model.mixers"),
    *("model.delta_key_heads", "model.delta_value_heads", "model.delta_key_dim", "model.delta_value_dim"),
    *("placement.planner", "placement.slots", "placement.slots_per_rank"),
)
"""The keys that these rules read, beside those of stages."""


def few_bits_problems(
    model: ModelConfig, moe: MoEConfig, lora: LoraConfig, placement: PlacementConfig, tp: int, upcycle: str
) -> Iterator[str]:
    yield from misfits(model, moe)
    for name in ("base", "dense_base"):
        if not (kind := getattr(model, name)):
            continue
        told = f"model.{name} ({kind!r})"
        if not lora.rank:
            yield f"{told} needs lora.rank: what is kept in few bits is not trained, its adapters are"
        if upcycle != "off":
            yield f"{told} cannot go with init.upcycle ({upcycle!r}); upcycle in a run before"
    if model.dense_base and tp > 1:
        yield (
            f"model.dense_base ({model.dense_base!r}) needs parallel.tp = 1, not {tp}: matrices in few bits "
            "are not cut; leave it empty"
        )
    if model.base:
        yield from expert_problems(f"model.base ({model.base!r})", moe, placement, tp)


def lora_problems(
    lora: LoraConfig, model: ModelConfig, moe: MoEConfig, placement: PlacementConfig, tp: int
) -> Iterator[str]:
    """What adapters cannot go with."""
    if not lora.rank:
        return
    if (latent := [name for name in lora.targets if name in LATENT]) and model.attention != "mla":
        yield f"lora.targets names {latent[0]}, which latent attention has alone (model.attention = 'mla')"
    if model.memory:
        yield f"lora.rank ({lora.rank}) cannot go with model.memory ({model.memory}); set one of them to 0"
    beside = [name for name in lora.targets if name not in ("experts", *PROJECTIONS)]
    others = [f"model.mixers ({kind})" for kind in sorted(model.held_mixers - {"attention"})]
    if beside and others:
        yield (
            f"lora.targets ({', '.join(beside)}) cannot go with {others[0]}: adapters stand beside attention "
            "and experts alone; set lora.targets = experts"
        )
    sharded = tp > 1 and moe.expert_tp == "sharded"
    if lora.has("experts") and sharded and placement.in_use and not placement.at_ease:
        yield (
            f"placement.planner ({placement.planner!r}), placement.slots and slots_per_rank cannot go "
            "with lora.rank and moe.expert_tp = 'sharded': parts of an adapter are whole on every tp rank "
            "and would move apart; choose 'auto', or moe.expert_tp = 'folded'"
        )


def misfits(model: ModelConfig, moe: MoEConfig) -> Iterator[str]:
    """Matrices of a model that cannot be kept as it says."""
    if not model.base and not model.dense_base:
        return
    # Which load torch: that takes seconds, and a mistyped key is told before.
    from moeclipse.model.count import dense_matrices, expert_matrices
    from moeclipse.ops.frozen import KINDS

    kinds = (
        ("base", model.base, expert_matrices(model, moe)),
        ("dense_base", model.dense_base, dense_matrices(model, moe)),
    )
    for name, kind, matrices in kinds:
        if kind and not matrices:
            yield f"model.{name} ({kind!r}) needs layers with experts; leave it empty"
        for what, (rows, columns) in matrices.items() if kind else ():
            if why := KINDS[kind].fits(rows, columns):
                yield f"model.{name} ({kind!r}) cannot keep {what}, {rows} x {columns}: {why}; choose another"


def expert_problems(told: str, moe: MoEConfig, placement: PlacementConfig, tp: int) -> Iterator[str]:
    if tp > 1 and moe.expert_tp == "sharded":
        yield (
            f"{told} cannot go with moe.expert_tp = 'sharded': matrices in few bits are not cut; choose "
            "'folded'"
        )
    if placement.in_use and not placement.at_ease:
        yield (
            f"placement.planner ({placement.planner!r}), placement.slots and slots_per_rank cannot go with "
            f"{told}: experts in few bits stay where they are; choose 'auto' or 'static'"
        )
    if moe.shadow not in ("off", "auto", ()):
        yield (
            f"moe.shadow ({moe.shadow!r}) cannot go with {told}: experts in few bits are not lent; set it "
            "to 'off'"
        )
