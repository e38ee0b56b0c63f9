"""A model as costs see it: widths and numbers, and the parameters that follow from them.

Which layers have experts and what they see are lists; everything else is alike in all layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from moeclipse.cost.cluster import ExpertChoice
from moeclipse.cost.kernels import keys_seen


@dataclass(frozen=True, kw_only=True)
class TrainedLayer:
    """What of one layer is trained; a layer that is trained whole needs none of this."""

    attn: float = 0.0
    """Of the weights of attention's products, the share that has gradients ..."""
    route: float = 0.0
    shared: float = 0.0
    mlp: float = 0.0
    """... and of routed experts, or of a dense block."""
    norms: bool = False
    dense_parameters: float = 0.0
    """That are trained beside experts, adapters included."""
    expert_parameters: float = 0.0
    """The same of one expert."""
    rank: int = 0
    attn_adapters: tuple[tuple[int, int], ...] = ()
    """(out, in) of the products that have adapters of this rank."""
    expert_adapters: tuple[tuple[int, int], ...] = ()

    @property
    def dense_adapted(self) -> float:
        """Parameters of adapters, which a model that is trained whole has not."""
        return float(self.rank * sum(map(sum, self.attn_adapters)))

    @property
    def expert_adapted(self) -> float:
        return float(self.rank * sum(map(sum, self.expert_adapters)))


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    vocab: int
    d_model: int
    num_heads: int
    kv_heads: int
    """Of keys and values; latent attention has as many as of queries."""
    d_qk: int
    d_v: int
    q_rank: int = 0
    """Latent attention: of queries; 0: they are projected at once."""
    kv_rank: int = 0
    """Latent attention: of keys and values; 0: it is none."""
    d_rope: int = 0
    """Latent attention: of d_qk, the part that all heads' keys share."""
    gate_width: int = 0
    """Of the gate on what attention took."""
    qk_norm: bool = False
    moe_layers: tuple[bool, ...]
    windows: tuple[int, ...] = ()
    """Of each layer; empty: all see everything."""
    dense_width: int = 0
    expert_width: int = 0
    """Hidden width of one expert ..."""
    gated: bool = True
    """... whose first projection is twice as wide."""
    experts: ExpertChoice
    shared_width: int = 0
    tied: bool = False
    losses: int = 1
    """Times that the head is computed: one more for each token predicted beyond the next."""
    trained: tuple[TrainedLayer, ...] = ()
    """Of each layer; empty: everything is."""
    trained_tables: tuple[bool, bool] = (True, True)
    """Embedding and head."""
    expert_bits: float = 0.0
    """Of a weight of the frozen base, where experts are kept in few and decoded before each product ..."""
    dense_bits: float = 0.0
    """... and of attention, dense blocks and shared experts."""

    @property
    def num_layers(self) -> int:
        return len(self.moe_layers)

    @property
    def up_width(self) -> int:
        """Of one expert's first projection."""
        return self.expert_width * (2 if self.gated else 1)

    def window_of(self, layer: int) -> int:
        return self.windows[layer] if self.windows else 0

    def projections(self) -> list[tuple[int, int, bool]]:
        """(out, in, whether it is cut over tp) of attention's products."""
        D, H = self.d_model, self.num_heads
        out = (D, H * self.d_v, True)
        if not self.kv_rank:
            inputs = H * self.d_qk + self.kv_heads * (self.d_qk + self.d_v) + self.gate_width
            return [(inputs, D, True), out]
        nope = self.d_qk - self.d_rope
        keys = [(self.kv_rank + self.d_rope, D, False), (H * (nope + self.d_v), self.kv_rank, True)]
        if not self.q_rank:
            return [(H * self.d_qk, D, True), *keys, out]
        return [(self.q_rank, D, False), (H * self.d_qk, self.q_rank, True), *keys, out]

    @cached_property
    def attention_parameters(self) -> float:
        return float(sum(out * inner for out, inner, _ in self.projections()))

    @property
    def expert_parameters(self) -> float:
        """Of one expert."""
        return float(self.d_model * (self.up_width + self.expert_width))

    def dense_parameters(self, layer: int) -> float:
        """Of a layer, without its experts."""
        D = self.d_model
        own = self.attention_parameters + 2 * D
        if not self.moe_layers[layer]:
            return own + 3.0 * D * self.dense_width
        return own + D * self.experts.num_experts + 3.0 * D * self.shared_width

    def training(self, layer: int) -> TrainedLayer | None:
        """None: all of the layer is trained."""
        return self.trained[layer] if self.trained else None

    def trained_dense(self, layer: int) -> float:
        part = self.training(layer)
        return self.dense_parameters(layer) if part is None else part.dense_parameters

    def trained_experts(self, layer: int) -> float:
        """Of all experts of a layer."""
        part = self.training(layer)
        each = self.expert_parameters if part is None else part.expert_parameters
        return each * self.experts.num_experts if self.moe_layers[layer] else 0.0

    def matrix_parameters(self, layer: int) -> float:
        """That a base in few bits keeps so, experts apart."""
        width = self.shared_width if self.moe_layers[layer] else self.dense_width
        return self.attention_parameters + 3.0 * self.d_model * width

    @property
    def table_parameters(self) -> float:
        """Of the embedding, or of the head."""
        return float(self.vocab * self.d_model)

    @property
    def parameters(self) -> float:
        """Of all of the model."""
        tables = (1 if self.tied else 2) * self.table_parameters + self.d_model
        experts = sum(self.moe_layers) * self.experts.num_experts * self.expert_parameters
        return tables + experts + sum(map(self.dense_parameters, range(self.num_layers)))

    def flops_per_token(self, sequence: int) -> float:
        """Of a step: 4 for each weight that a token meets in a product, 2 more for each that is trained, and
        attention by the keys it sees."""
        met = trained = 0.0
        total = 0.0
        for layer, moe in enumerate(self.moe_layers):
            dense, expert = self.dense_parameters(layer) - 2 * self.d_model, self.expert_parameters
            part = self.training(layer)
            if part is None:
                mine = dense + (self.experts.top_k * expert if moe else 0.0)
                trained += mine
            else:
                dense, expert = dense + part.dense_adapted, expert + part.expert_adapted
                mine = dense + (self.experts.top_k * expert if moe else 0.0)
                norms = 2 * self.d_model if part.norms else 0
                trained += part.dense_parameters - norms
                trained += self.experts.top_k * part.expert_parameters if moe else 0.0
            met += mine
            total += keys_seen(sequence, self.window_of(layer))
        head = self.losses * self.table_parameters
        products = 4.0 * (met + head) + 2.0 * (trained + (head if self.trained_tables[1] else 0.0))
        return products + 6.0 * total * self.num_heads * (self.d_qk + self.d_v)
