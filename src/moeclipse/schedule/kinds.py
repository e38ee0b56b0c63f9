"""What an op does: a part of the model in one of its forms, and the lane on which that runs.

    TABLE      every kind there is, by lane
    kinds.X    a kind by the name that texts, files and traces show: kinds.ATTN_F, kinds.SEND_B, kinds.F
    KINDS      all of them, by that name; KIND_OF by part and form

Contract: each kind exists once, so kinds are compared by identity and hash at no cost: a step may hold a
million ops, whose kinds are keys of many tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

COMPUTE, A2A, DP, TP = "compute", "a2a", "dp", "tp"
P2P = "p2p"
"""Its lanes are named p2p:source>destination: one per direction, so a receive never blocks a send."""
TO_DEVICE, TO_HOST = "host:fetch", "host:store"
"""Between the host's memory and the device's: both directions at once."""


class Part(Enum):
    __hash__ = object.__hash__  # by identity: what Enum does is slow

    STAGE = auto()
    """A whole stage; the kind is named by its form alone."""
    # Of a layer, in forward order.
    ATTN = auto()
    ROUTE = auto()
    SHARED = auto()
    DISPATCH = auto()
    MLP = auto()
    COMBINE = auto()
    HEAD = auto()
    # Of the exchange of one MoE layer.
    S = auto()
    """Rows on their way to experts."""
    C = auto()
    """Experts."""
    R = auto()
    """Results on their way back."""
    SHADOW = auto()
    INPUT = auto()
    """Of a layer that runs again: between its forward and its backward it may lie on the host."""
    # Between two stages.
    SEND = auto()
    RECV = auto()
    # What else travels while a layer runs (`launch`).
    COUNTS = auto()
    """Rows that each rank has for each expert, where a gate or a choice of replicas asks for them."""
    LOADS = auto()
    """Rows for each expert over all tokens of a microbatch; at the end of a step, of all of it."""
    SIZES = auto()
    """How many rows go from whom to whom."""
    SCORES = auto()
    TENSOR = auto()
    """A gather or a sum over the tp ranks."""
    # Behind the microbatches.
    TIED = auto()
    """Gradients of an embedding that two stages hold."""
    BUCKET = auto()
    WEIGHTS = auto()
    """Of a layer's experts: they may lie on the host, and visit the device."""
    GRAD = auto()
    """Of a bucket: between backward and an update under the next forward it may lie on the host."""
    RESULTS = auto()
    """Loss, and the norm of all gradients."""


class Form(Enum):
    __hash__ = object.__hash__

    F = auto()
    """Forward."""
    B = auto()
    """Backward: dX, and of a whole stage dW too."""
    I = auto()
    """dX of a whole stage."""
    W = auto()
    """dW."""
    R = auto()
    """Forward once more (recompute)."""
    PAIR = auto()
    """F of one microbatch beside B of another."""
    SELF = auto()
    """An action beside itself: its compute hides its communication."""
    SEND = auto()
    """Of shadows: parameters to the ranks that hold them."""
    REDUCE = auto()
    """Gradients to the ranks that own the parameters."""
    ADD = auto()
    """Of shadows: their gradients into the owner's."""
    UNSHARD = auto()
    RESHARD = auto()
    SUM = auto()
    UPDATE = auto()
    """The optimizer's."""
    FETCH = auto()
    """Of what lies in the host's memory: to the device ..."""
    STORE = auto()
    """... and back."""
    GATHER = auto()


@dataclass(frozen=True, eq=False, slots=True)
class Kind:
    name: str
    part: Part
    form: Form
    lane: str
    """COMPUTE, A2A, DP, TP, TO_DEVICE, TO_HOST or P2P; that of a transfer also names its two ranks."""

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"kinds.{self.name}"

    def __reduce__(self) -> str:
        """Copies are the kind itself."""
        return self.name


TABLE: tuple[tuple[str, tuple[Part, ...], tuple[Form, ...]], ...] = (
    (COMPUTE, (Part.STAGE,), (Form.F, Form.B, Form.I, Form.W, Form.PAIR, Form.SELF)),
    (DP, (Part.STAGE,), (Form.REDUCE, Form.UNSHARD, Form.RESHARD)),
    (P2P, (Part.SEND, Part.RECV), (Form.F, Form.B)),
    (COMPUTE, (Part.ATTN, Part.ROUTE, Part.SHARED, Part.MLP, Part.HEAD), (Form.F, Form.B, Form.W, Form.R)),
    (A2A, (Part.DISPATCH,), (Form.F, Form.B, Form.R)),
    (A2A, (Part.COMBINE,), (Form.F, Form.B)),
    (A2A, (Part.S, Part.R), (Form.F, Form.B)),
    (COMPUTE, (Part.C,), (Form.F, Form.B, Form.W)),
    (A2A, (Part.SHADOW,), (Form.SEND, Form.REDUCE)),
    (COMPUTE, (Part.SHADOW,), (Form.F, Form.B, Form.W, Form.ADD)),
    (A2A, (Part.COUNTS,), (Form.F, Form.R)),
    (A2A, (Part.LOADS, Part.SIZES), (Form.F,)),
    (A2A, (Part.SCORES,), (Form.F, Form.B)),
    (TP, (Part.TENSOR,), (Form.F, Form.B, Form.R)),
    (DP, (Part.TIED,), (Form.SUM,)),
    (DP, (Part.BUCKET,), (Form.REDUCE, Form.GATHER)),
    (COMPUTE, (Part.BUCKET,), (Form.UPDATE,)),
    (TO_DEVICE, (Part.BUCKET,), (Form.FETCH,)),
    (TO_HOST, (Part.BUCKET,), (Form.STORE,)),
    (TO_HOST, (Part.INPUT, Part.GRAD, Part.WEIGHTS), (Form.STORE,)),
    (TO_DEVICE, (Part.INPUT, Part.GRAD, Part.WEIGHTS), (Form.FETCH,)),
    (DP, (Part.RESULTS,), (Form.GATHER,)),
    (DP, (Part.LOADS,), (Form.GATHER, Form.SUM)),
)


def _name(part: Part, form: Form) -> str:
    return form.name if part is Part.STAGE else f"{part.name}_{form.name}"


KIND_OF: dict[tuple[Part, Form], Kind] = {
    (part, form): Kind(_name(part, form), part, form, lane)
    for lane, parts, forms in TABLE
    for part in parts
    for form in forms
}
KINDS: dict[str, Kind] = {kind.name: kind for kind in KIND_OF.values()}


def _of(part: Part, *forms: Form) -> tuple[Kind, ...]:
    return tuple(KIND_OF[part, form] for form in forms)


F, B, I, W, PAIR, SELF = _of(Part.STAGE, Form.F, Form.B, Form.I, Form.W, Form.PAIR, Form.SELF)
REDUCE, UNSHARD, RESHARD = _of(Part.STAGE, Form.REDUCE, Form.UNSHARD, Form.RESHARD)
SEND_F, SEND_B = _of(Part.SEND, Form.F, Form.B)
RECV_F, RECV_B = _of(Part.RECV, Form.F, Form.B)
ATTN_F, ATTN_B, ATTN_W, ATTN_R = _of(Part.ATTN, Form.F, Form.B, Form.W, Form.R)
ROUTE_F, ROUTE_B, ROUTE_W, ROUTE_R = _of(Part.ROUTE, Form.F, Form.B, Form.W, Form.R)
SHARED_F, SHARED_B, SHARED_W, SHARED_R = _of(Part.SHARED, Form.F, Form.B, Form.W, Form.R)
DISPATCH_F, DISPATCH_B, DISPATCH_R = _of(Part.DISPATCH, Form.F, Form.B, Form.R)
MLP_F, MLP_B, MLP_W, MLP_R = _of(Part.MLP, Form.F, Form.B, Form.W, Form.R)
COMBINE_F, COMBINE_B = _of(Part.COMBINE, Form.F, Form.B)
HEAD_F, HEAD_B, HEAD_W, HEAD_R = _of(Part.HEAD, Form.F, Form.B, Form.W, Form.R)
S_F, S_B = _of(Part.S, Form.F, Form.B)
C_F, C_B, C_W = _of(Part.C, Form.F, Form.B, Form.W)
R_F, R_B = _of(Part.R, Form.F, Form.B)
SHADOW_SEND, SHADOW_REDUCE, SHADOW_ADD = _of(Part.SHADOW, Form.SEND, Form.REDUCE, Form.ADD)
SHADOW_F, SHADOW_B, SHADOW_W = _of(Part.SHADOW, Form.F, Form.B, Form.W)

TRANSFERS = (SEND_F, RECV_F, SEND_B, RECV_B)
"""A stage is named by whoever launches: 3SEND_F1 meets 4RECV_F1."""

COUNTS_F, COUNTS_R = _of(Part.COUNTS, Form.F, Form.R)
(SIZES_F,) = _of(Part.SIZES, Form.F)
SCORES_F, SCORES_B = _of(Part.SCORES, Form.F, Form.B)
TENSOR_F, TENSOR_B, TENSOR_R = _of(Part.TENSOR, Form.F, Form.B, Form.R)
LOADS_F, LOADS_GATHER, LOADS_SUM = _of(Part.LOADS, Form.F, Form.GATHER, Form.SUM)
BUCKET_REDUCE, BUCKET_UPDATE, BUCKET_GATHER = _of(Part.BUCKET, Form.REDUCE, Form.UPDATE, Form.GATHER)
BUCKET_FETCH, BUCKET_STORE = _of(Part.BUCKET, Form.FETCH, Form.STORE)
INPUT_STORE, INPUT_FETCH = _of(Part.INPUT, Form.STORE, Form.FETCH)
GRAD_STORE, GRAD_FETCH = _of(Part.GRAD, Form.STORE, Form.FETCH)
WEIGHTS_STORE, WEIGHTS_FETCH = _of(Part.WEIGHTS, Form.STORE, Form.FETCH)
(TIED_SUM,) = _of(Part.TIED, Form.SUM)
(RESULTS_GATHER,) = _of(Part.RESULTS, Form.GATHER)

STATE_COPIES = (BUCKET_FETCH, BUCKET_STORE)
WEIGHT_COPIES = (WEIGHTS_STORE, WEIGHTS_FETCH)
COPIES = (*STATE_COPIES, INPUT_STORE, INPUT_FETCH, GRAD_STORE, GRAD_FETCH, *WEIGHT_COPIES)
"""Between the two memories of one rank: nobody is met, and the host does not wait to launch them."""
LAUNCHES = (COUNTS_F, COUNTS_R, LOADS_F, SIZES_F, SCORES_F, SCORES_B, TENSOR_F, TENSOR_B, TENSOR_R)
"""What another op of the layer launches while it runs; `Op.step` is its place in `LayerShape.launches`."""
ENDS = (
    TIED_SUM,
    BUCKET_REDUCE,
    GRAD_STORE,
    GRAD_FETCH,
    RESULTS_GATHER,
    LOADS_GATHER,
    LOADS_SUM,
    BUCKET_FETCH,
    BUCKET_UPDATE,
    BUCKET_STORE,
    BUCKET_GATHER,
)
"""What is left of a step behind its microbatches; of buckets `Op.step` is the number."""
AWAITED = (
    *(COUNTS_F, COUNTS_R, SIZES_F, TENSOR_F, TENSOR_B, TENSOR_R),
    *(TIED_SUM, RESULTS_GATHER, LOADS_GATHER, LOADS_SUM),
)
"""The host goes on behind these only when they have ended."""
