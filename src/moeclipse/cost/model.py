"""Seconds per op: given as a table, or computed from the shape of a layer and the hardware under it.

A table maps op kinds, by the names that `schedule/kinds` gives them, to seconds. It need not say everything:
`sim/durations` derives the rest. `fixed` (latency, launch of a small kernel) is what each chunk pays
where an op is cut, so that cutting has a price.

Hazard: with layer ops nothing is additive. dW is almost free while it hides an exchange, so the cost of a
whole action must come from simulating its layer ops, not from summing them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from moeclipse.core.errors import ConfigError
from moeclipse.cost.hardware import Device, Link

LANES = ("compute", "a2a", "p2p", "dp")


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Everything the simulator needs to know about time."""

    name: str = "given"
    seconds: Mapping[str, float]
    """By name of an op kind, and SELF_F, SELF_B, ... of actions that overlap themselves."""
    fixed: Mapping[str, float] = field(default_factory=dict)
    """Added to every op of a kind, however small its chunk."""
    wire: float = 0.0
    """One transfer between two stages."""
    launch: float = 0.0
    """Host time per op."""
    inline_compute: bool = False
    """Compute runs on the host (CPU): what is launched behind it waits for its end."""
    contention: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """(slowed lane, busy lane): rate at which the first runs while the second is busy on that rank; p2p
    beside p2p: a second wire of the same rank."""
    rank_speed: tuple[float, ...] = ()
    """Compute speed of each rank; empty: all 1."""
    stage_scale: tuple[float, ...] = ()
    """Factor on the compute of each stage (uneven layer splits, the output head); empty: all 1."""

    def __post_init__(self) -> None:
        problems = [
            f"cost of {kind} ({value}) must not be negative"
            for kind, value in {**self.seconds, **self.fixed}.items()
            if value < 0
        ]
        for what, value in (("wire", self.wire), ("launch", self.launch)):
            if value < 0:
                problems.append(f"{what} ({value}) must not be negative")
        for (slowed, busy), rate in self.contention.items():
            if slowed not in LANES or busy not in LANES:
                problems.append(f"contention {slowed}/{busy} must name two of the lanes {', '.join(LANES)}")
            if not 0 < rate <= 1:
                problems.append(f"contention {slowed}/{busy} ({rate}) must lie in (0, 1]: it is a rate")
        problems += [f"speeds of ranks ({speed}) must be positive" for speed in self.rank_speed if speed <= 0]
        problems += [
            f"scales of stages ({scale}) must be positive" for scale in self.stage_scale if scale <= 0
        ]
        if problems:
            raise ConfigError(problems)


UNIT = Costs(name="unit", seconds={"F": 1.0, "I": 1.0, "W": 1.0, "B": 2.0, "PAIR": 3.0})
"""The units in which schedules are usually drawn."""

DEEPSEEK_V3 = Costs(
    name="deepseek-v3",
    seconds={
        "ATTN_F": 4.37e-3,
        "ROUTE_F": 0.0,
        "DISPATCH_F": 6.69e-3,
        "MLP_F": 4.60e-3,
        "COMBINE_F": 8.68e-3,
        "COMBINE_B": 5.77e-3,
        "MLP_B": 5.31e-3,
        "MLP_W": 5.10e-3,
        "DISPATCH_B": 7.49e-3,
        "ROUTE_B": 0.0,
        "ROUTE_W": 0.0,
        "ATTN_B": 9.34e-3,
        "ATTN_W": 2.39e-3,
    },
)
"""Means per layer of DeepSeek's published training trace (github.com/deepseek-ai/profile-data: H800, 64 ranks
share the experts, 4K tokens, 4 layers per pair, 20 of 132 processors communicate). Durations were taken under
overlap, so contention is inside them; router and shared expert are inside attention and MLP."""

PRESETS: dict[str, Costs] = {"unit": UNIT, "deepseek-v3": DEEPSEEK_V3}


@dataclass(frozen=True, kw_only=True)
class LayerWork:
    """One transformer layer and what one rank sees of it."""

    tokens: int = 4096
    """Tokens of one microbatch on one rank."""
    sequence: int = 4096
    d_model: int = 7168
    attn_params: int = 187_000_000
    """Parameters of the attention projections."""
    attn_width: int = 16384
    """Heads times head width."""
    d_ff: int = 2048
    """Hidden width of one expert."""
    num_experts: int = 256
    top_k: int = 8
    shared_width: int = 2048
    """Hidden width of all shared experts together; 0: none."""
    row_bytes_per_value: float = 2.0

    def forward_flops(self) -> dict[str, float]:
        """Two per multiply-add; SwiGLU has three products."""
        T, D = self.tokens, self.d_model
        return {
            "ATTN": 2.0 * T * self.attn_params + self.attn_core_flops(),
            "ROUTE": 2.0 * T * D * self.num_experts,
            "SHARED": 6.0 * T * D * self.shared_width,
            "MLP": 6.0 * T * self.top_k * D * self.d_ff,
        }

    def attn_core_flops(self) -> float:
        """Scores and their product with the values: two products, of which a causal mask leaves half."""
        return 2.0 * self.tokens * self.sequence * self.attn_width

    def exchange_bytes(self, num_ranks: int) -> float:
        """Bytes one rank sends in one dispatch or combine when load is even."""
        share = (num_ranks - 1) / num_ranks
        return self.tokens * self.top_k * self.d_model * self.row_bytes_per_value * share


def layer_costs(
    work: LayerWork, device: Device, link: Link, num_ranks: int, *, comm_processors: int = 0
) -> Costs:
    """dX and dW each take as long as forward, except that attention's core has no dW and twice the dX."""
    rate = device.flops * device.efficiency
    seconds: dict[str, float] = {}
    for part, flops in work.forward_flops().items():
        core = work.attn_core_flops() if part == "ATTN" else 0.0
        seconds[f"{part}_F"] = flops / rate
        seconds[f"{part}_B"] = (flops + core) / rate
        seconds[f"{part}_W"] = (flops - core) / rate
    exchange = link.seconds(work.exchange_bytes(num_ranks)) if num_ranks > 1 else 0.0
    for part in ("DISPATCH", "COMBINE"):
        seconds[f"{part}_F"] = seconds[f"{part}_B"] = exchange
    fixed = {f"{part}_{form}": link.latency for part in ("DISPATCH", "COMBINE") for form in "FBR"}
    left = 1 - comm_processors / device.processors
    return Costs(
        name=f"{device.name} over {link.name}",
        seconds=seconds,
        fixed=fixed,
        wire=link.seconds(work.tokens * work.d_model * work.row_bytes_per_value),
        launch=device.launch,
        inline_compute=device.name == "cpu",
        contention={("compute", "a2a"): left} if comm_processors else {},
    )
