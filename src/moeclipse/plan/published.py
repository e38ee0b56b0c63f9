"""Published steps with the layout they name, to hold predictions against.

Two of them were used for fitting, one constant each; the others are predictions. Stages are cut as the
framework cuts them, or evenly where nothing is known of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from moeclipse.cost.cluster import ExpertChoice, cluster
from moeclipse.cost.kernels import MEASURED_ON_HOPPER, Type
from moeclipse.cost.layer_seconds import Software
from moeclipse.cost.sizes import ModelSizes
from moeclipse.plan.layout import Layout
from moeclipse.plan.step import Step, Terms

SLOWS = 1.085 / MEASURED_ON_HOPPER.inside
"""Kernels inside a step took 1.085 of what they take alone: fitted on Qwen3-235B with TP2 (19.7 s), and taken
for whatever is published."""
MEGATRON = Software(
    name="Megatron",
    host_s=9.3e-3,
    hides=0.37,
    slows=SLOWS,
    source="host: fitted on Qwen3-235B with TP4 (29.0 s), where nothing else could take so long; hidden: "
    "36.55 % of the expert exchange in NVIDIA's own matched traces of Qwen3-30B",
)
DEEPSEEK = Software(
    name="DeepSeek",
    host_s=0.0,
    hides=1.0,
    slows=SLOWS,
    source="exchanges fully hidden, says the technical report; the host is not spoken of",
)
V3 = ModelSizes(
    vocab=129280,
    d_model=7168,
    num_heads=128,
    kv_heads=128,
    d_qk=192,
    d_v=128,
    q_rank=1536,
    kv_rank=512,
    d_rope=64,
    moe_layers=(False,) * 3 + (True,) * 58,
    dense_width=18432,
    expert_width=2048,
    experts=ExpertChoice(num_experts=256, top_k=8, num_groups=8, top_groups=4),
    shared_width=2048,
)
V3_TWO_TOKENS = replace(V3, moe_layers=(*V3.moe_layers, True), losses=2)
"""With the layer that predicts a second token."""
QWEN3_235B = ModelSizes(
    vocab=151936,
    d_model=4096,
    num_heads=64,
    kv_heads=4,
    d_qk=128,
    d_v=128,
    qk_norm=True,
    moe_layers=(True,) * 94,
    expert_width=1536,
    experts=ExpertChoice(num_experts=128, top_k=8),
)
QWEN3_30B = replace(QWEN3_235B, d_model=2048, num_heads=32, moe_layers=(True,) * 48, expert_width=768)


@dataclass(frozen=True, kw_only=True)
class Row:
    name: str
    seconds: float
    """Of a step, as published or from tokens per second."""
    model: ModelSizes
    device: str
    layout: Layout
    software: Software
    source: str
    dtype: Type = "bf16"
    stages: tuple[int, ...] | None = None
    """Layers of each stage; None: not told, as even as can be."""
    fitted: str = ""
    """The constant that this row gave."""

    @property
    def batch(self) -> int:
        layout = self.layout
        return layout.microbatches * layout.samples * layout.dp * layout.ep

    def predicted(self, change: Callable[[Software], Software] = lambda software: software) -> float:
        terms = Terms(
            model=self.model,
            cluster=cluster(self.device),
            sequence=4096,
            dtype=self.dtype,
            software=change(self.software),
        )
        return Step(terms, self.layout, self.stages).time().seconds


QWEN_STAGES = (2, *(3,) * 30, 2)
QWEN_LAYOUT = Layout(pp=8, ep=16, tp=2, schedule="vpp", stages_per_rank=4, microbatches=128)
ZOO = "Megatron-MoE-ModelZoo, best_practice/Qwen3"
BRIDGE = "Megatron-Bridge, performance summary, 25.09"
ROWS = (
    Row(
        name="DeepSeek-V3, 2,048 H800, PP16 EP64, DualPipe, fp8",
        seconds=19.9,
        model=V3_TWO_TOKENS,
        device="h800",
        layout=Layout(
            pp=16, dp=2, ep=64, schedule="dualpipe", stages_per_rank=2, microbatches=120, overlap="pair"
        ),
        software=DEEPSEEK,
        dtype="fp8",
        source="DeepSeek-V3 technical report: 180,000 GPU hours for 1e12 tokens, all included",
    ),
    Row(
        name="DeepSeek-V3, 1,024 H100, TP2 PP8 VP4 EP64, overlap, fp8",
        seconds=8192 * 4096 / (1297 * 1024),
        model=V3_TWO_TOKENS,
        device="h100",
        layout=Layout(
            pp=8,
            dp=2,
            ep=32,
            tp=2,
            schedule="vpp+1",
            stages_per_rank=4,
            microbatches=128,
            overlap="pair",
        ),
        software=MEGATRON,
        dtype="fp8",
        stages=(1, *(2,) * 30, 1),
        source=BRIDGE,
    ),
    Row(
        name="Qwen3-235B, 256 H100, TP2 PP8 VPP4 EP32",
        seconds=19.7,
        model=QWEN3_235B,
        device="h100",
        layout=QWEN_LAYOUT,
        software=MEGATRON,
        stages=QWEN_STAGES,
        source=ZOO,
        fitted="kernels inside a step (1.085)",
    ),
    Row(
        name="Qwen3-235B, the same with 1F1B overlap",
        seconds=17.6,
        model=QWEN3_235B,
        device="h100",
        layout=replace(QWEN_LAYOUT, schedule="vpp+1", overlap="pair"),
        software=MEGATRON,
        stages=QWEN_STAGES,
        source=ZOO,
    ),
    Row(
        name="Qwen3-235B, 256 H100, TP4 PP8 VPP4 EP8",
        seconds=29.0,
        model=QWEN3_235B,
        device="h100",
        layout=Layout(pp=8, dp=4, ep=2, tp=4, schedule="vpp", stages_per_rank=4, microbatches=256),
        software=MEGATRON,
        stages=QWEN_STAGES,
        source=ZOO,
        fitted="host (9.3 ms)",
    ),
    Row(
        name="Qwen3-30B, 16 H100, PP2 VP24 EP8, two sequences",
        seconds=512 * 4096 / (10494 * 16),
        model=QWEN3_30B,
        device="h100",
        layout=Layout(pp=2, ep=8, schedule="vpp", stages_per_rank=24, microbatches=32, samples=2),
        software=MEGATRON,
        source=BRIDGE,
    ),
)
