"""What can be combined: every factor of a configuration with its levels, and what a choice of levels means.

A *level* is a set of configuration keys (or a function of the layout that gives them); a *row* chooses one
level of each factor. From a row come three things: the layout of ranks, the configuration that they run, and
the *reference*, which is what the same model is without anything that should not change it: one process,
microbatch by microbatch.

Two kinds of rows are another model in another layout, by their definition: gates that limit what leaves a
node, and replicas that step for themselves. Their reference keeps the ranks, and the table of experts, and
is plain in everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from moeclipse.core.config import problems_of, with_values
from moeclipse.train.config import TrainConfig, layout_problems

NUM_EXPERTS = 8
BASE: dict[str, Any] = {
    "model.vocab_size": 257,
    "model.num_layers": 4,
    "model.d_model": 16,
    "model.d_ff": 10,
    "model.num_heads": 4,
    "model.num_kv_heads": 4,
    "model.head_dim": 4,
    "model.dtype": "float64",
    "model.init_std": 0.1,
    "moe.num_experts": NUM_EXPERTS,
    "moe.d_ff": 6,
    "gate.z_loss": 0.01,
    "gate.balance_loss": 0.05,
    "data.seq_len": 8,
    "optim.lr": 1e-2,
    "optim.eps": 1e-6,  # where a gradient is nothing but rounding, the update should be as small
    "optim.warmup_steps": 2,
    "optim.bucket_mb": 0.01,
    "integrity.every": 1,
    "run.steps": 3,
}


@dataclass(frozen=True)
class Layout:
    """How ranks are laid out, and which of them share a host."""

    dp: int = 1
    ep: int = 1
    tp: int = 1
    pp: int = 1

    @property
    def num_ranks(self) -> int:
        return self.dp * self.ep * self.tp * self.pp

    @property
    def num_data(self) -> int:
        return self.dp * self.ep

    @property
    def axes(self) -> dict[str, int]:
        return {"dp": self.dp, "tp": self.tp, "pp": self.pp}

    @property
    def keys(self) -> dict[str, Any]:
        return {f"parallel.{axis}": getattr(self, axis) for axis in ("dp", "ep", "tp", "pp")}


Level = Mapping[str, Any] | Callable[[Layout, "Row"], Mapping[str, Any]]
Row = Mapping[str, str]

LAYOUTS = {
    "ep2": Layout(ep=2),
    "dp2": Layout(dp=2),
    "tp2": Layout(tp=2),
    "pp2": Layout(pp=2),
    "ep4": Layout(ep=4),
    "dp2 ep2": Layout(dp=2, ep=2),
    "ep2 tp2": Layout(ep=2, tp=2),
    "dp2 tp2": Layout(dp=2, tp=2),
    "tp4": Layout(tp=4),
    "ep2 pp2": Layout(ep=2, pp=2),
    "dp2 pp2": Layout(dp=2, pp=2),
    "tp2 pp2": Layout(tp=2, pp=2),
    "pp4": Layout(pp=4),
}
PLANNED: dict[str, Any] = {
    "placement.start_step": 1,
    "placement.every": 1,
    "placement.max_moved": 1.0,
    "placement.slots_per_rank": NUM_EXPERTS,
}


def expert_ranks(layout: Layout, row: Row) -> int:
    """Ranks that share the experts of a layer."""
    return layout.ep * (1 if row["expert_tp"] == "sharded" else layout.tp)


def replicated(layout: Layout, row: Row) -> Mapping[str, Any]:
    """Every rank holds its share, in reverse order, and the first expert of the next rank."""
    ranks = expert_ranks(layout, row)
    shares = [list(range(NUM_EXPERTS))[rank::ranks][::-1] for rank in range(ranks)]
    others = [shares[(rank + 1) % ranks][0] for rank in range(ranks)] if ranks > 1 else []
    table = [(*share, other) for share, other in zip(shares, others, strict=True)] if others else shares
    return {"placement.slots": tuple(map(tuple, table))}


def ragged(layout: Layout, row: Row) -> Mapping[str, Any]:
    """The last rank holds all experts but those that the others hold alone, one each; no replicas."""
    ranks = expert_ranks(layout, row)
    single = [(expert,) for expert in range(ranks - 1)]
    return {"placement.slots": (*single, tuple(range(ranks - 1, NUM_EXPERTS)))}


def samples(per_microbatch: int, seq_len: int) -> Level:
    """So many samples in a microbatch over all data ranks."""

    def level(layout: Layout, row: Row) -> Mapping[str, Any]:
        accumulate = int(row["accumulate"])
        return {"data.seq_len": seq_len, "data.batch_size": accumulate * per_microbatch}

    return level


def samples_per_rank(samples: int, seq_len: int) -> Level:
    def level(layout: Layout, row: Row) -> Mapping[str, Any]:
        size = int(row["accumulate"]) * layout.num_data * samples
        return {"data.seq_len": seq_len, "data.batch_size": size}

    return level


def uneven(layout: Layout, row: Row) -> Mapping[str, Any]:
    """Neither microbatches nor ranks get equally many samples."""
    accumulate = int(row["accumulate"])
    return {"data.batch_size": accumulate * 4 + 3}


MLA: dict[str, Any] = {
    "model.attention": "mla",
    "model.kv_lora_rank": 8,
    "model.qk_nope_head_dim": 4,
    "model.qk_rope_head_dim": 4,
    "model.v_head_dim": 6,
}
FACTORS: dict[str, dict[str, Level]] = {
    "layout": {name: layout.keys for name, layout in LAYOUTS.items()},
    "hosts": {"one": {}, "two": {}},
    "schedule": {
        name: {"pipeline.schedule": name}
        for name in (
            "auto",
            "gpipe",
            "1f1b",
            "1f1b-pairs",
            "vpp",
            "vpp+1",
            "zb-h1",
            "zb-v",
            "dualpipe",
            "dualpipev",
        )
    },
    "overlap": {name: {"pipeline.overlap": name} for name in ("off", "pair", "pair+self")},
    "recompute": {
        "off": {},
        "attn": {"pipeline.recompute": "attn"},
        "mlp": {"pipeline.recompute": "mlp", "pipeline.recompute_layers": 3},
        "moe": {"pipeline.recompute": "moe"},
        "full": {"pipeline.recompute": "full"},
    },
    "pipeline chunks": {"auto": {}, "1": {"pipeline.chunks": 1}, "3": {"pipeline.chunks": 3}},
    "exchange": {
        "blocking": {},
        "smart": {"moe.schedule": "smart"},
        "smart 1x2": {"moe.schedule": "smart", "moe.group_size": 1, "moe.chunks": 2},
        "smart 2x1": {"moe.schedule": "smart", "moe.group_size": 2, "moe.chunks": 1},
        "smart 1x5": {"moe.schedule": "smart", "moe.group_size": 1, "moe.chunks": 5},
    },
    "shadow": {
        "off": {},
        "auto": {"moe.shadow": "auto"},
        "two": {"moe.shadow": (0, 5)},
        "all": {"moe.shadow": tuple(range(NUM_EXPERTS))},
    },
    "transport": {name: {"moe.transport": name} for name in ("direct", "two_level", "peer", "pinned")},
    "peer": {name: {"parallel.peer": name} for name in ("off", "auto", "on")},
    "placement": {
        "even": {},
        "ragged": ragged,
        "replicated": replicated,
        "fedavg": lambda layout, row: {**replicated(layout, row), "placement.reduce": "fedavg"},
        **{
            name: {**PLANNED, "placement.planner": name}
            for name in ("random", "greedy", "incremental", "wrap_fill", "exact")
        },
    },
    "gate": {
        "softmax": {},
        "sigmoid": {"gate.kind": "sigmoid", "gate.bias_rate": 0.01, "gate.scale": 2.5},
        "groups": {"gate.num_groups": 4, "gate.top_groups": 2, "gate.renormalise": False},
        "top 1": {"gate.top_k": 1, "gate.renormalise": False},
        "switch": {"gate.kind": "switch", "gate.top_k": 1},
        "gshard": {"gate.kind": "gshard"},
        "noisy": {"gate.kind": "noisy"},
    },
    "choose": {
        "top_k": {},
        "gap": {"gate.choose": "gap", "gate.threshold": 0.02},
        "top_p": {"gate.choose": "top_p", "gate.top_k": 3, "gate.top_p": 0.4},
        "mean": {"gate.choose": "top_p", "gate.top_k": 3, "gate.top_p": 0.5, "gate.mean_experts": 1.8},
        "threshold": {"gate.choose": "threshold", "gate.threshold": 0.12},
    },
    "capacity": {
        "none": {},
        "drop": {"gate.capacity_factor": 0.8},
        "pad": {"gate.capacity_factor": 0.7, "gate.overflow": "pad"},
    },
    "leaving": {
        "free": {},
        "reroute": {"gate.max_leaving": 0.3},
        "drop": {"gate.max_leaving": 0.3, "gate.excess": "drop"},
    },
    "attention": {
        "mha": {},
        "gqa": {"model.num_kv_heads": 2},
        "mla": MLA,
        "mla low-rank": {**MLA, "model.q_lora_rank": 6},
        "memory": {"model.memory": 4, "data.order": "stream"},
    },
    "dense layers": {"0": {}, "1": {"model.num_dense_layers": 1}, "3": {"model.num_dense_layers": 3}},
    "tied": {"no": {}, "yes": {"model.tie_embeddings": True}},
    "experts": {
        "swiglu": {},
        "geglu shared": {"moe.activation": "geglu", "moe.num_shared_experts": 1},
        "relu2 bias": {"moe.activation": "relu2", "moe.expert_bias": True},
        "gelu bias shared": {
            "moe.activation": "gelu",
            "moe.expert_bias": True,
            "moe.num_shared_experts": 2,
        },
    },
    "expert_tp": {name: {"moe.expert_tp": name} for name in ("folded", "sharded")},
    "sequence": {
        "parallel": {},
        "whole": {"parallel.sequence_parallel": False},
        "whole, blocking": {"parallel.sequence_parallel": False, "parallel.async_all_reduce": "off"},
    },
    "accumulate": {str(number): {"optim.accumulate": number} for number in (4, 1, 2, 5)},
    "tokens": {
        "many": samples_per_rank(2, 8),
        "uneven": uneven,
        "one sample": samples(1, 8),
        "one token a rank": samples_per_rank(1, 1),
        "two tokens a rank": samples_per_rank(2, 1),
        "one token": samples(1, 1),
    },
    "optimizer": {
        "clipped": {},
        "free": {"optim.clip_norm": 0.0, "optim.bucket_mb": 25.0, "optim.loss_scale": 1024.0},
    },
    "hand-over": {"none": {}, "to one": {}, "from one": {}, "again": {}},
}
DTYPES = ("float32", "bfloat16", "float16")
"""Besides float64, in which rows are exact."""
MODEL_SECTIONS = ("model.", "gate.", "data.", "optim.", "run.")
MODEL_KEYS = ("moe.num_experts", "moe.d_ff", "moe.num_shared_experts", "moe.activation", "moe.expert_bias")
LAYOUT_KEYS = (
    *(f"parallel.{axis}" for axis in ("dp", "ep", "tp", "pp")),
    "parallel.sequence_parallel",
    "moe.expert_tp",
    "placement.slots",
    "placement.reduce",
)
"""What the model depends on besides, where it depends on the layout."""


def usual_row(start: Row | None = None) -> dict[str, str]:
    """The first level of each factor, but for those of `start`."""
    row = {factor: next(iter(levels)) for factor, levels in FACTORS.items()}
    if (start or {}).get("schedule") == "dualpipe":
        row["layout"] = "pp2"  # nothing comes in from the other end where there is one stage
    return {**row, **(start or {})}


@dataclass(frozen=True)
class Setting:
    """What some ranks run."""

    layout: Layout
    hosts: tuple[int, ...]
    values: Mapping[str, Any]

    def config(self, corpus: str) -> TrainConfig:
        return with_values(TrainConfig(), {**self.values, "data.files": (corpus,)})


@dataclass(frozen=True)
class Case:
    """What one row of levels means."""

    row: Row
    dtype: str = "float64"

    @property
    def setting(self) -> Setting:
        layout = LAYOUTS[self.row["layout"]]
        halves = 2 if self.row["hosts"] == "two" else 1
        hosts = tuple(halves * rank // layout.num_ranks for rank in range(layout.num_ranks))
        values: dict[str, Any] = {**BASE}
        for factor, levels in FACTORS.items():
            level = levels[self.row[factor]]
            values |= level(layout, self.row) if callable(level) else level
        if self.dtype == "float16":
            values["optim.loss_scale"] = 128.0  # "auto" begins so high that a first step may overflow
        return Setting(layout, hosts, {**values, "model.dtype": self.dtype})

    @property
    def refused(self) -> list[str]:
        """What is said before any rank starts; where it is nothing, the case must run."""
        setting = self.setting
        config = setting.config("any")
        return [*problems_of(config), *layout_problems(config, setting.layout.num_ranks)]

    @property
    def depends_on_layout(self) -> bool:
        limited = self.row["leaving"] != "free" and self.row["hosts"] == "two"
        return limited or self.row["placement"] == "fedavg"

    @property
    def reference(self) -> Setting:
        """The same model with nothing that should not change it; on one rank, wherever that is defined."""
        mine = self.setting
        keys = (*MODEL_KEYS, *LAYOUT_KEYS) if self.depends_on_layout else MODEL_KEYS
        values = {
            key: value for key, value in mine.values.items() if key.startswith(MODEL_SECTIONS) or key in keys
        }
        if self.depends_on_layout:
            return Setting(mine.layout, mine.hosts, values)
        return Setting(Layout(), (0,), values)

    def __str__(self) -> str:
        usual = usual_row()
        said = [f"{factor}: {level}" for factor, level in self.row.items() if level != usual[factor]]
        return ", ".join([*said, self.dtype] if self.dtype != "float64" else said) or "nothing special"
