"""What a Mixture-of-Experts layer is made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class GateConfig:
    """Which experts a token visits, and what keeps their load even."""

    kind: Literal["softmax", "sigmoid", "switch", "gshard", "noisy"] = "softmax"
    top_k: int = 2
    """Experts per token (switch: 1, gshard: 2); the most of them where gate.choose lets it vary."""
    choose: Literal["top_k", "gap", "top_p", "threshold"] = "top_k"
    """How many experts a token visits: top_k, or fewer by its probabilities (docs/gates.md)."""
    threshold: float = 0.1
    """threshold: the least probability of a further expert; gap: the first largest gap to the best one."""
    gap_factor: float = 0.8
    """gap: the largest gap moves towards this many times the mean gap of the two best, ..."""
    gap_rate: float = 0.05
    """... each step by this part of the way; 0 keeps it."""
    top_p: float = 0.7
    """top_p: experts are added until their probabilities sum to this; where the controller begins."""
    mean_experts: float = 0.0
    """top_p: a controller moves gate.top_p so that tokens visit so many experts on average; 0: off."""
    mean_rate: float = 0.5
    """How fast the controller moves logit(top_p)."""
    renormalise: bool = True
    """Divide the chosen scores by their sum (softmax and sigmoid)."""
    renormalise_eps: float = 1e-20
    """Added to that sum."""
    scale: float = 1.0
    """Factor on the scores (DeepSeek's routed_scaling_factor)."""
    num_groups: int = 1
    """Experts are cut into this many groups of equal size, ..."""
    top_groups: int = 1
    """... and a token chooses among the experts of this many groups only."""
    group_score: Literal["max", "top2"] = "top2"
    """What ranks a group: its best score, or the sum of its best two."""
    logit_bias: bool = False
    """Add a learned bias to the logits (gpt-oss)."""
    bias_rate: float = 0.0
    """Loss-free balancing: each step moves a selection bias by this much towards even load; 0: off."""
    balance_loss: float = 0.01
    """Coefficient of the load-balance loss."""
    z_loss: float = 0.0
    """Coefficient of the router z-loss."""
    capacity_factor: float = 0.0
    """Most rows per expert = ceil(factor x rows / experts) over the global microbatch; 0: dropless."""
    overflow: Literal["drop", "pad"] = "drop"
    """drop: rows over capacity are dropped; pad: besides, every expert computes exactly capacity rows."""
    eval_capacity_factor: float = -1.0
    """The factor outside of training; 0: dropless there; -1: gate.capacity_factor."""
    min_capacity: int = 0
    """Rows that an expert takes at least, however few tokens there are."""
    capacity_over: Literal["all", "rank"] = "all"
    """all: room is counted over the tokens of all ranks; rank: each rank counts its own, as others do."""
    drop_policy: Literal["position", "score"] = "position"
    """Who is kept over capacity: first choices in the order of tokens; or the highest scores (of a rank)."""
    renormalise_kept: bool = False
    """Divide the scores of a token once more, by the sum of those within capacity."""
    sample_second: bool = False
    """In training, draw the second expert by its probability instead of taking the second best."""
    max_leaving: float = 1.0
    """Most of a rank's rows, all choices counted, that may leave its node, as a share; 1: no limit."""
    excess: Literal["reroute", "drop"] = "reroute"
    """Rows over gate.max_leaving: go to the best expert of the node that is still free, or are dropped."""

    def problems(self) -> Iterator[str]:
        if self.top_k < 1:
            yield f"gate.top_k ({self.top_k}) must be at least 1"
        fixed = {"switch": 1, "gshard": 2}.get(self.kind)
        if fixed is not None and self.top_k != fixed:
            yield f"gate.top_k ({self.top_k}) must be {fixed} for gate.kind = {self.kind!r}"
        if self.num_groups < 1 or not 1 <= self.top_groups <= self.num_groups:
            yield (
                f"gate.top_groups ({self.top_groups}) must be between 1 and "
                f"gate.num_groups ({self.num_groups})"
            )
        if self.kind not in ("softmax", "sigmoid"):
            needs = f"needs gate.kind softmax or sigmoid, not {self.kind!r}"
            if self.num_groups > 1:
                yield f"gate.num_groups ({self.num_groups}) {needs}"
            if self.bias_rate:
                yield f"gate.bias_rate ({self.bias_rate}) {needs}"
        for name in ("bias_rate", "balance_loss", "z_loss", "capacity_factor"):
            if getattr(self, name) < 0:
                yield f"gate.{name} ({getattr(self, name)}) must not be negative"
        if self.scale <= 0:
            yield f"gate.scale ({self.scale}) must be positive"
        if not 0 <= self.max_leaving <= 1:
            yield f"gate.max_leaving ({self.max_leaving}) must be between 0 and 1; 1 is no limit"
        yield from capacity_problems(self)
        yield from dynamic_problems(self)

    @property
    def expected_experts(self) -> float:
        """Experts per token that room is made for."""
        return self.mean_experts or self.top_k


def capacity_problems(config: GateConfig) -> Iterator[str]:
    """What is wrong with the keys of room for rows, and of choices that other libraries have."""
    if config.overflow == "pad" and not config.capacity_factor:
        yield "gate.overflow = 'pad' needs gate.capacity_factor > 0"
    if config.overflow == "pad" and config.capacity_over == "rank":
        yield "gate.overflow = 'pad' needs gate.capacity_over = 'all': an expert has one size"
    if config.drop_policy == "score" and config.capacity_over == "all":
        yield "gate.drop_policy = 'score' needs gate.capacity_over = 'rank': no rank knows others' scores"
    if config.eval_capacity_factor < 0 and config.eval_capacity_factor != -1:
        yield f"gate.eval_capacity_factor ({config.eval_capacity_factor}) must not be negative, or be -1"
    if config.min_capacity < 0:
        yield f"gate.min_capacity ({config.min_capacity}) must not be negative"
    if config.renormalise_eps < 0:
        yield f"gate.renormalise_eps ({config.renormalise_eps}) must not be negative"
    bounded = config.capacity_factor or config.eval_capacity_factor > 0
    ones = config.top_k == 1 and (config.kind == "noisy" or (config.renormalise and config.kind != "switch"))
    if bounded and config.drop_policy == "score" and ones:
        yield (
            f"gate.drop_policy = 'score' with gate.top_k = 1 and gate.kind = {config.kind!r}: renormalised, "
            "all scores are 1, and rows would be dropped by position; set gate.renormalise = false"
        )
    if not bounded and (config.min_capacity or config.renormalise_kept):
        name = "min_capacity" if config.min_capacity else "renormalise_kept"
        yield f"gate.{name} needs gate.capacity_factor > 0: without it nothing is dropped"
    if config.sample_second and (config.kind, config.top_k, config.choose) != ("softmax", 2, "top_k"):
        yield "gate.sample_second needs gate.kind = 'softmax', gate.top_k = 2 and gate.choose = 'top_k'"


def dynamic_problems(config: GateConfig) -> Iterator[str]:
    """What is wrong with the keys of dynamic gates."""
    if config.choose == "top_k":
        if config.mean_experts:
            yield (
                f"gate.mean_experts ({config.mean_experts}) needs gate.choose = 'top_p': "
                "with 'top_k' every token visits gate.top_k experts"
            )
        return
    if config.kind not in ("softmax", "sigmoid"):
        yield (
            f"gate.choose = {config.choose!r} needs gate.kind softmax or sigmoid, not {config.kind!r}, "
            "which decides about places itself"
        )
    if config.top_k < 2:
        yield (
            f"gate.choose = {config.choose!r} needs gate.top_k (the most experts of a token) of at least 2, "
            f"not {config.top_k}: one place is always used"
        )
    if config.mean_experts and config.choose != "top_p":
        yield (
            f"gate.mean_experts ({config.mean_experts}) needs gate.choose = 'top_p', not {config.choose!r}"
        )
    elif config.mean_experts and not 1 < config.mean_experts < config.top_k:
        yield (
            f"gate.mean_experts ({config.mean_experts}) must lie between 1 and gate.top_k "
            f"({config.top_k}), both excluded; 0 leaves gate.top_p where it is"
        )
    if not 0 < config.top_p < 1:
        yield f"gate.top_p ({config.top_p}) must lie between 0 and 1, both excluded"
    if not 0 <= config.threshold <= 1:
        yield f"gate.threshold ({config.threshold}) must be between 0 and 1"
    if not 0 <= config.gap_rate <= 1:
        yield f"gate.gap_rate ({config.gap_rate}) must be between 0 and 1; 0 keeps the limit"
    if config.gap_factor < 0 or config.gap_factor == float("inf"):
        yield f"gate.gap_factor ({config.gap_factor}) must not be negative"
    if config.mean_rate <= 0:
        yield f"gate.mean_rate ({config.mean_rate}) must be positive"


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """What the experts compute."""

    num_experts: int = 8
    d_ff: int = 256
    """Hidden width of one expert."""
    num_shared_experts: int = 0
    """Experts that see every token, beside the routed ones (computed as one, this many times as wide)."""
    shared_d_ff: int = 0
    """Hidden width of the shared expert; 0: num_shared_experts x d_ff."""
    shared_gate: bool = False
    """Each token weighs the shared expert by a sigmoid of its own (Qwen2)."""
    activation: Literal["swiglu", "geglu", "relu2", "gelu", "clamped_swiglu"] = "swiglu"
    """Between an expert's projections; relu2 (squared ReLU) and gelu have no gate, so up is half as wide."""
    expert_bias: bool = False
    """Add a bias after each of an expert's projections."""
    score_input: bool = False
    """Scores multiply what goes into an expert, not what comes out of it (Llama 4)."""
    expert_tp: Literal["folded", "sharded"] = "folded"
    """With parallel.tp: folded: each tp rank holds other experts; sharded: a part of each expert's width."""

    @property
    def shared_width(self) -> int:
        """Hidden width of the shared expert."""
        return self.shared_d_ff or self.num_shared_experts * self.d_ff


@dataclass(frozen=True, kw_only=True)
class ExchangeConfig:
    """How rows travel to experts: it changes speed and never the model.

    These are the defaults of a layer in a loop of one's own, where nothing is tried that was not asked for;
    those of a run are in `MoEConfig`.
    """

    schedule: Literal["blocking", "smart", "gathered", "auto"] = "blocking"
    """blocking: send all rows, compute, return all; smart: in units, computing one while others travel;
    gathered: every token to every rank, sums back: no size depends on the gate, so that on GPUs a microbatch
    is one graph; auto: blocking, unless a trial in the first steps shows that units are faster."""
    group_size: int | Literal["auto"] = "auto"
    """Ranks that exchange rows in one step of the smart schedule; auto: those of a host, or each alone."""
    chunks: int | Literal["auto"] = "auto"
    """Slices into which the rows of a step are cut (smart); auto: chosen from measured costs."""
    shadow: Literal["auto", "off"] | tuple[int, ...] = "off"
    """Experts copied to other ranks for one step: chosen each step from measured costs, none, or these."""
    transport: Literal["direct", "two_level", "peer", "pinned", "auto"] = "direct"
    """direct: rank to rank; two_level: in the host, then across; peer, pinned: by memory of one host."""
    kernels: Literal["auto", "off"] = "auto"
    """auto: our Triton kernels compute bf16 and fp16 experts on CUDA, where they fit; off: plain torch."""


@dataclass(frozen=True, kw_only=True)
class MoEConfig(ExchangeConfig, ExpertsConfig):
    """The experts of each MoE layer."""

    schedule: Literal["blocking", "smart", "gathered", "auto"] = "auto"
    """blocking: send all rows, compute, return all; smart: in units, computing one while others travel;
    gathered: every token to every rank, sums back: no size depends on the gate, so that on GPUs a microbatch
    is one graph; auto: blocking, unless a trial in the first steps shows that units are faster."""
    transport: Literal["direct", "two_level", "peer", "pinned", "auto"] = "auto"
    """direct: rank to rank; two_level: in the host, then across; peer, pinned: by memory of one host;
    auto: direct, unless a trial at start shows that another is faster."""

    def problems(self) -> Iterator[str]:
        if self.num_experts < 1:
            yield f"moe.num_experts ({self.num_experts}) must be at least 1"
        if self.d_ff < 1:
            yield f"moe.d_ff ({self.d_ff}) must be at least 1"
        if self.num_shared_experts < 0:
            yield f"moe.num_shared_experts ({self.num_shared_experts}) must not be negative"
        if self.shared_d_ff < 0:
            yield f"moe.shared_d_ff ({self.shared_d_ff}) must not be negative; 0 is num_shared_experts x d_ff"
        if not self.num_shared_experts and (self.shared_d_ff or self.shared_gate):
            given = f"shared_d_ff ({self.shared_d_ff})" if self.shared_d_ff else "shared_gate"
            yield f"moe.{given} needs a shared expert; set moe.num_shared_experts = 1"
        for name in ("group_size", "chunks"):
            value = getattr(self, name)
            if value != "auto" and value < 1:
                yield f'moe.{name} ({value}) must be at least 1, or "auto"'
        if not isinstance(self.shadow, str):
            unknown = [expert for expert in self.shadow if not 0 <= expert < self.num_experts]
            if unknown:
                yield f"moe.shadow names expert {unknown[0]}; experts are 0 to {self.num_experts - 1}"

    @property
    def exchange(self) -> ExchangeConfig:
        return ExchangeConfig(**{field.name: getattr(self, field.name) for field in fields(ExchangeConfig)})


SHAPE_KEYS = ("num_experts", "d_ff", "num_shared_experts")
"""Of ExpertsConfig: what the parameters look like."""
STYLE_KEYS = ("activation", "expert_bias", "shared_d_ff", "shared_gate", "score_input")
"""Of ExpertsConfig: the same; told in checkpoints where they are not as usual."""


LAYER_KEYS = (
    *("moe.num_experts", "moe.schedule", "moe.expert_tp", "moe.expert_bias"),
    *("gate.top_k", "gate.num_groups", "gate.top_groups", "gate.threshold", "gate.choose"),
    *("gate.renormalise", "gate.overflow"),
)
"""What `layer_problems` reads: it can be asked where none of these is wrong by itself."""


def layer_problems(moe: MoEConfig, gate: GateConfig, tp: int = 1) -> Iterator[str]:
    """What does not fit between the experts of a layer, their gate, and `tp` ranks that share their width."""
    yield from gate_problems(gate, moe.num_experts)
    if moe.schedule == "smart" and gate.overflow == "pad":
        yield "gate.overflow = 'pad' needs moe.schedule = 'blocking', not 'smart': each unit would be padded"
    yield from gathered_problems(moe, gate, tp)
    if moe.expert_tp == "sharded" and tp > 1 and moe.expert_bias:
        yield (
            f"moe.expert_bias needs moe.expert_tp = 'folded' with parallel.tp ({tp}): each part of a sharded "
            "sum would add it"
        )


def gathered_problems(moe: MoEConfig, gate: GateConfig, tp: int) -> Iterator[str]:
    """What tokens that all ranks have cannot go with."""
    if moe.schedule != "gathered":
        return
    if tp > 1:
        yield f"moe.schedule = 'gathered' needs parallel.tp = 1, not {tp}: tp ranks have tokens in common"
    if gate.overflow == "pad":
        yield "moe.schedule = 'gathered' cannot go with gate.overflow = 'pad'; choose 'drop' or 'blocking'"
    if moe.shadow not in ("off", "auto", ()):
        yield (
            f"moe.schedule = 'gathered' cannot go with moe.shadow ({moe.shadow!r}): all tokens are "
            "everywhere, only experts are not; set it to 'off'"
        )
    if moe.transport not in ("auto", "direct", "peer"):
        yield (
            f"moe.schedule = 'gathered' cannot go with moe.transport = {moe.transport!r}; choose 'peer' "
            "(memory of one host's GPUs), 'direct' (torch.distributed) or 'auto'"
        )


def gate_problems(gate: GateConfig, num_experts: int) -> Iterator[str]:
    """What does not fit between a gate and the number of experts it chooses from."""
    if gate.top_k > num_experts:
        yield f"gate.top_k ({gate.top_k}) must be at most moe.num_experts ({num_experts})"
    if gate.choose == "threshold" and gate.renormalise and gate.threshold * num_experts > 1:
        yield (
            f"gate.threshold ({gate.threshold}) must be at most 1 / moe.num_experts ({1 / num_experts:.3g}) "
            "with gate.renormalise: at the start all probabilities are alike, every token would visit one "
            "expert with the score 1, and the gate would learn nothing from the loss; lower it, or set "
            "gate.renormalise = false"
        )
    if gate.num_groups > 1:
        if num_experts % gate.num_groups:
            yield f"gate.num_groups ({gate.num_groups}) must divide moe.num_experts ({num_experts})"
        elif gate.top_k > (open_experts := gate.top_groups * (num_experts // gate.num_groups)):
            yield (
                f"gate.top_k ({gate.top_k}) must be at most the {open_experts} experts of "
                f"gate.top_groups ({gate.top_groups}) groups"
            )
