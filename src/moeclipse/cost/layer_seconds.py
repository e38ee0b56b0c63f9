"""Seconds of the parts of one layer on one rank, from the model, the axes and the cluster.

    ATTN       norms, projections, rotary positions, attention; tp gathers before it and scatters behind it
    ROUTE      the gate's product and a few passes over its scores
    SHARED     shared experts
    DISPATCH, COMBINE   rows over near and far links
    MLP        rows sorted by expert, two grouped products, the activation, rows summed by token; or a dense
               block, cut over tp
    HEAD       norm, logits and loss; logits are passed over, there and back

Experts are folded over tp: each tp rank sends its part of the tokens. `imbalance` is what the busiest rank
has of the mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from moeclipse.cost.cluster import Cluster
from moeclipse.cost.kernels import Kernels, Type, keys_seen
from moeclipse.cost.sizes import ModelSizes, TrainedLayer

SCORE_PASSES = 6
"""Times that a gate reads or writes all scores of a token, in each direction."""
LOGIT_BYTES = 8.0
"""Moved for each logit, in each direction: written, read, and as much for its gradient."""
UPDATE_BYTES = 34.0
"""That an update moves of a parameter: fp32 weight and moments read and written (24), its gradient read for
the norm and for the update (8), the bf16 weight written (2)."""


class Seconds(NamedTuple):
    """Forward, gradient of inputs, gradient of weights."""

    F: float = 0.0
    B: float = 0.0
    W: float = 0.0


def slower(alone: Seconds, by: float) -> Seconds:
    """As inside of a step."""
    return Seconds(*(by * part for part in alone))


@dataclass(frozen=True, kw_only=True)
class Software:
    """What a framework does beside its kernels."""

    name: str
    host_s: float
    """That the host takes to launch one layer for one microbatch, forward and backward."""
    hides: float
    """Of the communication that stands beside compute in a pair, how much is hidden in fact."""
    source: str
    again: float = 1.0
    """Of experts' forward, what kernels compute a second time where they are recomputed."""
    slows: float = 1.0
    """What its kernels take inside a step over what ours do."""

    def inside(self, cluster: Cluster) -> float:
        """What a kernel takes inside a step over what it takes alone."""
        return self.slows * cluster.constants.inside

    def again_on(self, cluster: Cluster) -> float:
        return 1.0 if cluster.device.name == "cpu" else self.again


OURS = Software(
    name="moeclipse",
    host_s=1e-3,
    hides=0.9,
    source="193 launches a layer and microbatch at 5 us; 0.90 to 0.95 hidden in pairs (bench/fb_overlap)",
    again=2 / 3,  # of three products the last is read by nobody
)


@dataclass(frozen=True, kw_only=True)
class MicrobatchWork:
    """One microbatch of one data index, and who shares it."""

    model: ModelSizes
    cluster: Cluster
    tokens: int
    """Of the tp ranks of one data index together."""
    sequence: int
    tp: int = 1
    ep: int = 1
    dtype: Type = "bf16"
    imbalance: float = 1.0
    two_level: bool = True
    tensor_inside: bool = True
    """Gathers and scatters over tp are inside the parts they surround; else they are priced apart."""

    @cached_property
    def kernels(self) -> Kernels:
        return Kernels(device=self.cluster.device, constants=self.cluster.constants)

    @cached_property
    def expert_ranks(self) -> int:
        return self.ep * self.tp

    @cached_property
    def value_bytes(self) -> float:
        """Of an activation: ranks on CPUs compute in fp32."""
        return 4.0 if self.cluster.device.name == "cpu" else 2.0

    def attention(self, layer: int) -> Seconds:
        m, k, T, tp = self.model, self.kernels, self.tokens, self.tp
        forward = backward = weights = 0.0
        for out, inner, cut in m.projections():
            rows, out_here, in_here = (
                (1.0 * T, out / tp, 1.0 * inner) if cut else (T / tp, 1.0 * out, 1.0 * inner)
            )
            if cut and out == m.d_model:
                out_here, in_here = 1.0 * out, inner / tp
            forward += k.product(rows, out_here, in_here, self.dtype) + self._quantised(rows * in_here)
            backward += k.product(rows, in_here, out_here, self.dtype) + self._quantised(rows * out_here)
            weights += k.product(out_here, in_here, rows, self.dtype) + k.stream(8.0 * out_here * in_here)
        part = m.training(layer)
        if part is not None:
            weights *= part.attn
            more = self._adapted(part, part.attn_adapters, T / tp)
            forward, backward, weights = forward + more.F, backward + more.B, weights + more.W
        decoded = self._decoded(m.dense_bits, m.attention_parameters / tp)
        heads, keys = m.num_heads / tp, keys_seen(self.sequence, m.window_of(layer))
        forward += k.attention(T, keys, heads, m.d_qk, m.d_v, backward=False)
        backward += k.attention(T, keys, heads, m.d_qk, m.d_v, backward=True)
        turned = T * heads * m.d_qk + T * m.kv_heads / tp * m.d_qk
        # rotary positions (and norms of heads) read and write; norms of the stream read two and write two
        passes = self.value_bytes * (2.0 * turned * (2 if m.qk_norm else 1) + 8.0 * T / tp * m.d_model)
        moved = self._tensor()
        forward += k.stream(passes) + 2 * moved + decoded
        backward += k.stream(1.5 * passes) + 2 * moved + decoded
        return Seconds(forward, backward, weights + moved)

    def route(self, layer: int = -1) -> Seconds:
        m, k = self.model, self.kernels
        T, E = self.tokens / self.tp, m.experts.num_experts
        passes = k.stream(4.0 * SCORE_PASSES * T * E) + SCORE_PASSES * k.launch
        product, part = k.product(T, E, m.d_model), m.training(layer)
        return Seconds(product + passes, product + passes, product * (1.0 if part is None else part.route))

    def shared(self, layer: int = -1) -> Seconds:
        if not self.model.shared_width:
            return Seconds()
        part = self.model.training(layer)
        found = self._block(self.tokens / self.tp, self.model.shared_width)
        return found._replace(W=found.W * (1.0 if part is None else part.shared))

    def dense(self, layer: int = 0) -> Seconds:
        """A layer's block without experts; tokens are gathered before it and scattered behind it."""
        found, moved = self._block(self.tokens, self.model.dense_width / self.tp), self._tensor()
        part = self.model.training(layer)
        share = 1.0 if part is None else part.mlp
        return Seconds(found.F + 2 * moved, found.B + 2 * moved, (found.W + moved) * share)

    def experts(self, layer: int = -1) -> Seconds:
        m, k = self.model, self.kernels
        rows = self.tokens / self.tp * m.experts.top_k * self.imbalance
        groups = max(m.experts.num_experts / self.expert_ranks, 1.0)
        D, up, down = m.d_model, m.up_width, m.expert_width
        sort = k.stream(2 * self.value_bytes * rows * D)
        act = k.stream(self.value_bytes * rows * (up + down))
        forward = k.grouped(rows, groups, up, D, self.dtype) + k.grouped(rows, groups, D, down, self.dtype)
        backward = k.grouped(rows, groups, D, up, self.dtype) + k.grouped(rows, groups, down, D, self.dtype)
        weights = k.grouped_weights(rows, groups, up, D, self.dtype)
        weights += k.grouped_weights(rows, groups, D, down, self.dtype)
        more = self._quantised(rows * (D + down))
        decoded = self._decoded(m.expert_bits, groups * m.expert_parameters)
        found = Seconds(
            forward + 2 * sort + act + more + decoded,
            backward + 2 * sort + 2 * act + more + decoded,
            weights + more,
        )
        part = m.training(layer)
        if part is None:
            return found
        beside = self._adapted(part, part.expert_adapters, rows, groups)
        return Seconds(found.F + beside.F, found.B + beside.B, found.W * part.mlp + beside.W)

    def dispatch(self) -> float:
        """Rows to experts; in 8 bits where products are."""
        return self._exchange(1.0 if self.dtype == "fp8" else self.value_bytes)

    def combine(self) -> float:
        return self._exchange(self.value_bytes)

    def head(self) -> Seconds:
        m, k = self.model, self.kernels
        vocab = m.vocab / self.tp
        product = k.product(self.tokens, vocab, m.d_model)
        passes = k.stream(LOGIT_BYTES * self.tokens * vocab)
        weights = k.product(vocab, m.d_model, self.tokens) + k.stream(8.0 * vocab * m.d_model)
        weights *= m.trained_tables[1]
        return Seconds(*(m.losses * part for part in (product + passes, product + passes, weights)))

    def transfer(self, stride: int) -> float:
        """Activations of one stage to the next, whose ranks lie `stride` apart."""
        sent = self.value_bytes * self.tokens / self.tp * self.model.d_model
        return self.cluster.link_of(stride).seconds(sent)

    def _block(self, rows: float, width: float) -> Seconds:
        k, D = self.kernels, self.model.d_model
        act = k.stream(3 * self.value_bytes * rows * width)
        forward = k.product(rows, 2 * width, D, self.dtype) + k.product(rows, D, width, self.dtype)
        backward = k.product(rows, D, 2 * width, self.dtype) + k.product(rows, width, D, self.dtype)
        weights = k.product(2 * width, D, rows, self.dtype) + k.product(D, width, rows, self.dtype)
        more = self._quantised(rows * (D + width))
        weights += k.stream(24.0 * width * D)
        more += self._decoded(self.model.dense_bits, 3 * width * D)
        return Seconds(forward + act + more, backward + 2 * act + more, weights + more)

    def _adapted(
        self, part: TrainedLayer, products: tuple[tuple[int, int], ...], rows: float, groups: float = 1.0
    ) -> Seconds:
        """Two thin products beside each wide one, there and back, and the gradients of both."""
        k, r = self.kernels, part.rank
        forward = backward = weights = 0.0
        for out, inner in products:
            forward += k.grouped(rows, groups, r, inner) + k.grouped(rows, groups, out, r)
            backward += k.grouped(rows, groups, r, out) + k.grouped(rows, groups, inner, r)
            weights += k.grouped_weights(rows, groups, r, inner) + k.grouped_weights(rows, groups, out, r)
        return Seconds(forward, backward, weights)

    def _decoded(self, bits: float, weights: float) -> float:
        """Weights in few bits are read and written out before a product reads them."""
        return self.kernels.stream((bits / 8 + 2.0) * weights) if bits else 0.0

    def _quantised(self, values: float) -> float:
        """Read in 16 bits and written in 8, where products are in 8."""
        return self.kernels.stream(3.0 * values) if self.dtype == "fp8" else 0.0

    def _tensor(self) -> float:
        """One gather or scatter of a microbatch's tokens over tp."""
        if not self.tensor_inside:
            return 0.0
        return self.cluster.collective(self.value_bytes * self.tokens * self.model.d_model, self.tp)

    def _exchange(self, value_bytes: float) -> float:
        row = self.model.d_model * value_bytes
        sent = self.tokens / self.tp * self.imbalance
        return self.cluster.exchange(
            sent, row, self.model.experts, self.expert_ranks, two_level=self.two_level
        )
