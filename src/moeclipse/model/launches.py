"""What the layers of a transformer launch beside rows, as a program lists it (`schedule/launch`).

    gate        counts for a capacity or for shadows, loads, sizes, scores and their gradients
    linears     under tp: gathers and sums around attention, dense blocks, head and embedding
    experts     under tp: tokens to the ranks that compute them, and back

A table of what the modules do, in the order in which they do it: whoever launches something new says so here,
and a ledger (`comm/async_ops/ledger`) tells where this was forgotten.
The tokens of experts come back when somebody reads a layer's output, so they belong to the op that does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from moeclipse.model.config import ModelConfig
from moeclipse.model.lora_config import ADAPTER, NO_LORA, LoraConfig
from moeclipse.moe.config import GateConfig, MoEConfig
from moeclipse.schedule import kinds
from moeclipse.schedule.kinds import Form, Kind
from moeclipse.schedule.launch import HostedLaunch

Words = tuple[list[str], list[str]]
"""Labels in front of an op's own work, and behind it."""
LOSS = "exchange of loss statistics"
TENSOR = {Form.F: kinds.TENSOR_F, Form.B: kinds.TENSOR_B, Form.R: kinds.TENSOR_R}


@dataclass(frozen=True, kw_only=True)
class LayerLaunches:
    """The launches of every layer of a model on given axes."""

    model: ModelConfig
    moe: MoEConfig
    gate: GateConfig
    dp: int
    ep: int
    tp: int
    parts_tokens: bool
    """Sequence parallelism: between linears each tp rank has its part of the tokens."""
    replicas: bool = False
    """Experts may be held by several ranks, which share their rows by the loads of a call."""
    lora: LoraConfig = NO_LORA
    frozen: Callable[[str], bool] = lambda _: False
    """Whether a parameter of this name wants no gradient: then nobody gathers inputs for it."""

    @property
    def sharded(self) -> bool:
        return self.tp > 1 and self.moe.expert_tp == "sharded"

    @property
    def rows(self) -> str:
        """The axis that rows travel on."""
        return "shard_experts" if self.sharded else "experts"

    @property
    def num_experts_ranks(self) -> int:
        return self.ep if self.sharded else self.ep * self.tp

    def of(self, stages: Sequence[range], rank_of: Sequence[int]) -> list[tuple[HostedLaunch, ...]]:
        """Of each layer of the model; `stages` are the layers of each stage, `rank_of` their places."""
        last = {layers[-1] for layers in stages}
        elsewhere = {
            stages[stage][0] for stage in range(1, len(stages)) if rank_of[stage] != rank_of[stage - 1]
        }
        return [
            (*self._routing(layer), *self._tensor(layer, receives=layer in elsewhere, ends=layer in last))
            for layer in range(self.model.num_layers)
        ]

    # the gate

    def _routing(self, layer: int) -> Iterator[HostedLaunch]:
        if self.model.is_dense(layer):
            return
        tokens, where = "data" if self.sharded else "stage", f"layer {layer}"
        if self.dp * self.ep * (1 if self.sharded else self.tp) > 1:
            if self.gate.capacity_factor and self.gate.capacity_over == "all":
                what = f"exchange of capacity counts, {where}"
                yield HostedLaunch(kinds.COUNTS_F, kinds.ROUTE_F, tokens, what, ahead=True)
                yield HostedLaunch(kinds.COUNTS_R, kinds.ROUTE_R, tokens, what, ahead=True)
            what = f"sum of expert loads, {where}"
            if self.replicas:  # routing waits for them, chunk by chunk
                yield HostedLaunch(kinds.COUNTS_F, kinds.ROUTE_F, tokens, what)
            else:
                yield HostedLaunch(kinds.LOADS_F, kinds.ROUTE_F, tokens, what, once=True)
            if self.moe.schedule == "gathered":  # autograd runs parts again, losses among them
                yield HostedLaunch(kinds.COUNTS_R, kinds.ROUTE_R, tokens, what)
        if self.num_experts_ranks == 1 or self.moe.schedule == "gathered":  # which tells nobody any sizes
            return
        if self.moe.shadow not in ("off", ()):
            yield HostedLaunch(kinds.COUNTS_F, kinds.ROUTE_F, self.rows, f"exchange of counts, {where}")
        yield HostedLaunch(kinds.SIZES_F, kinds.ROUTE_F, self.rows, f"exchange of sizes, {where}")
        what = f"dispatch of scores, {where}"
        pairs = 2 * self.gate.top_k  # a score, and where its row is
        yield HostedLaunch(kinds.SCORES_F, kinds.DISPATCH_F, self.rows, what, ahead=True, width=pairs)
        what = f"return of score gradients, {where}"
        yield HostedLaunch(kinds.SCORES_B, kinds.DISPATCH_B, self.rows, what, width=self.gate.top_k)

    # tensor parallelism

    def _tensor(self, layer: int, *, receives: bool, ends: bool) -> Iterator[HostedLaunch]:
        if self.tp == 1:
            return
        final = layer == self.model.num_layers - 1
        forward, backward = self._attention(layer)
        here = self._tokens_come(layer)
        again = (forward[0], forward[1] + here[0])
        before = self._tokens_return(layer - 1) if layer else self._embedding()[0]
        if receives:  # whoever sent it has brought them back
            before = []
        yield from self._inside(kinds.ATTN_F, (before + again[0], again[1]))
        yield from self._inside(kinds.ATTN_R, again)
        behind = backward[1] + ([] if layer else self._embedding()[1])
        yield from self._inside(kinds.ATTN_B, (here[1] + backward[0], behind))
        if self.model.is_dense(layer):
            up, down = f"up, layer {layer}", f"down, layer {layer}"
            back = self._column_back(up, f"layers.{layer}.dense.up.weight")
            there = (self._gathered(up), self._reduced(down))
            yield from self._inside(kinds.MLP_F, there)
            yield from self._inside(kinds.MLP_R, there)
            yield from self._inside(kinds.MLP_B, (self._gathered_back(down), back))
        else:
            yield from self._inside(kinds.COMBINE_B, (self._tokens_return_back(layer), []))
        if final:
            read = self._tokens_return(layer) + self._gathered("head")
            yield from self._inside(kinds.HEAD_F, (read, [LOSS]))
            weight = "embedding" if self.model.tie_embeddings else "head.weight"
            yield from self._inside(kinds.HEAD_B, ([], self._column_back("head", weight)))
        elif ends:
            yield from self._inside(kinds.SEND_F, (self._tokens_return(layer), []))

    def _inside(self, host: Kind, words: Words) -> Iterator[HostedLaunch]:
        kind = TENSOR[host.form]
        for ahead, labels in zip((True, False), words, strict=True):
            for what in labels:
                yield HostedLaunch(kind, host, "tensor", what, ahead=ahead, width=self._width(what))

    def _width(self, what: str) -> int:
        """Values for each token of what travels over tp: its activations, but for these."""
        if what == LOSS:
            return 3
        if "squares of" in what:
            return 1
        if ADAPTER in what:
            return self.lora.rank
        return self.model.rope_width if "rotary keys" in what else self.model.d_model

    def _gathered(self, label: str) -> list[str]:
        return [f"gather of inputs, {label}"] if self.parts_tokens else []

    def _reduced(self, label: str) -> list[str]:
        return [f"{'reduce-scatter' if self.parts_tokens else 'all-reduce'} of outputs, {label}"]

    def _gathered_back(self, label: str) -> list[str]:
        return [f"backward gather of outputs, {label}"] if self.parts_tokens else []

    def _column_back(self, label: str, *names: str) -> list[str]:
        """`names`: of the weights."""
        if self.parts_tokens:
            gather = [] if all(map(self.frozen, names)) else [f"backward gather of inputs, {label}"]
            return [*gather, f"reduce-scatter of d_x, {label}"]
        return [f"all-reduce of d_x, {label}"]

    def _attention(self, layer: int) -> tuple[Words, Words]:
        where, weights = f"layer {layer}", f"layers.{layer}.attention.{{}}.weight"
        out = f"o, {where}"
        if self.model.attention == "gqa":
            label = f"queries, keys and values, {where}"
            whole = self.model.qk_norm == "whole"
            squares = [f"squares of {name}, {where}" for name in ("queries", "keys")] if whole else []
            adapted = [f"{ADAPTER}{name}" for name in "qkv" if self.lora.has(name)]
            columns = [(f"{name}, {where}", weights.format(f"adapters.{name}.b")) for name in adapted]
            rows = [f"{ADAPTER}o, {where}"] if self.lora.has("o") else []
            narrow = [word for column, _ in columns for word in self._gathered(column)]
            sums = [word for row in (out, *rows) for word in self._reduced(row)]
            forward = (self._gathered(label), narrow + squares + sums)
            back = [f"backward of {what}" for what in reversed(squares)]
            back += [word for column in reversed(columns) for word in self._column_back(*column)]
            names = map(weights.format, "qkv")
            before = [word for row in (*rows, out) for word in self._gathered_back(row)]
            return forward, (before, back + self._column_back(label, *names))
        rotary, up, q_up = f"rotary keys, {where}", f"kv_up, {where}", f"q_up, {where}"
        moved = [rotary] if self.parts_tokens else []
        adapters = {
            name: (f"{ADAPTER}{name}, {where}", weights.format(f"adapters.{ADAPTER}{name}.b"))
            for name in ("q_up", "kv_up", "o")
            if self.lora.has(name)
        }
        beside = {name: [adapters[name]] if name in adapters else [] for name in ("q_up", "kv_up", "o")}
        inner = {
            name: [w for label, _ in given for w in self._gathered(label)] for name, given in beside.items()
        }
        rows = [label for label, _ in beside["o"]]
        sums = [word for row in (out, *rows) for word in self._reduced(row)]
        inside = inner["q_up"] + self._gathered(up) + inner["kv_up"] + moved + sums
        forward = (self._gathered(q_up), inside)
        ups = [
            *beside["kv_up"],
            (up, weights.format("kv_up")),
            *beside["q_up"],
            (q_up, weights.format("q_up")),
        ]
        back = [f"backward of {rotary}", *(word for given in ups for word in self._column_back(*given))]
        return forward, ([word for row in (*rows, out) for word in self._gathered_back(row)], back)

    def _embedding(self) -> Words:
        """In forward, and in backward."""
        if self.parts_tokens:
            gather = [] if self.frozen("embedding") else ["backward gather of embeddings"]
            return ["reduce-scatter of embeddings"], gather
        return ["all-reduce of embeddings"], []

    # experts under tp

    def _tokens_come(self, layer: int) -> Words:
        """What brings tokens to experts, in forward and in backward."""
        label = f"tokens of experts, layer {layer}"
        if self.model.is_dense(layer) or (self.parts_tokens and not self.sharded):
            return [], []
        return ([label] if self.parts_tokens else []), [f"backward of {label}"]

    def _tokens_return(self, layer: int) -> list[str]:
        """Launched by whoever reads the layer's output."""
        if self.model.is_dense(layer) or (self.parts_tokens and not self.sharded):
            return []
        return [f"tokens of experts, layer {layer}"]

    def _tokens_return_back(self, layer: int) -> list[str]:
        label = f"backward of tokens of experts, layer {layer}"
        return [label] if self.sharded and self.parts_tokens else []
