"""The one place that knows how a weight gradient reaches its accumulator.

Idea. A trainer gives each parameter a `main_grad` (fp32, or the parameter's dtype where that is wider) that
lives in a flat buffer and sums over microbatches. The product dy^T x adds into it inside the GEMM: no
temporary has the weight's size. A parameter without one, in a user's own loop, gets its gradient in `.grad`
as always, added to what is there. At the beginning of a step accumulators are declared empty and not cleared:
the first product is stored, and whoever cannot store clears first.

    now        the product runs inside backward
    deferred   it is queued under (microbatch, stage, part) and runs when the schedule says W

Contract. Deferred and immediate gradients add in the same order and give the same bits. A bucket hears that a
parameter is ready when its last backward has run AND none of its products is still queued. Queues must be
empty at the optimizer step (`check_empty`).

Hazard. A queued product keeps its operands alive: memory grows until W runs. What an empty main_grad holds is
of an earlier step: ask for it through `accumulator`, or call `fill`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import compress

import torch

from moeclipse.core.errors import ConfigError, ScheduleError
from moeclipse.ops.grouped_gemm import dense_wgrad
from moeclipse.ops.sum_parts import Place

WIDER = {
    torch.float64: (torch.float64,),
    torch.float32: (torch.float32, torch.float64),
    torch.bfloat16: (torch.bfloat16, torch.float32, torch.float64),
    torch.float16: (torch.float16, torch.float32, torch.float64),
}
"""The accumulators that products of each operand type may add into."""
CHUNK_ROWS = 512
"""Where operands must be widened first, this many rows at a time: the copy stays small."""

MANY = 1 << 30
"""Backward passes: more than there will be."""

Grad = torch.Tensor | None
Grads = tuple[Grad, ...]
Work = Callable[[], Sequence[Grad]]


class Accumulation:
    """Where one parameter's gradients go, and who waits for them."""

    def __init__(
        self, main_grad: torch.Tensor, ready: Callable[[], None], missing: set[Accumulation] | None = None
    ) -> None:
        self.main_grad, self._ready = main_grad, ready
        self._missing = set[Accumulation]() if missing is None else missing
        """Those that `ready` waits for, too."""
        self.empty = False
        """Nothing was added since the step began: what main_grad holds does not count."""
        self.queued = 0
        self.uses = 1
        """Passes through different parts of the model in which one microbatch meets the parameter."""
        self.elsewhere = 0
        """Further gradients of a step, which other ranks computed."""
        self._left = 0
        self._due = False

    def take_empty(self) -> bool:
        """Whether the caller, who has a gradient, is the first and stores it."""
        first, self.empty = self.empty, False
        return first

    def fill(self) -> None:
        """Make main_grad hold what was added, zeros where that is nothing."""
        if self.empty:
            self.empty = False
            self.main_grad.zero_()

    def add(self, grad: torch.Tensor) -> None:
        if self.empty:
            self.empty = False
            self.main_grad.copy_(grad)
        else:
            self.main_grad.add_(grad)

    def backward_done(self, passes: int = 1) -> None:
        """So many more of them; 0: a product that was queued has run."""
        self._left = max(self._left - passes, 0)
        self._due = self._left == 0 and (self._due or passes > 0)
        if self._due and self.queued == 0:
            self._due = False
            self._missing.discard(self)
            if not self._missing:
                self._ready()


def begin(states: Iterable[Accumulation], backwards: int = 1) -> None:
    """So many backward passes are still to come: what earlier ones reported does not count."""
    for state in states:
        state._left, state._due = backwards * state.uses + state.elsewhere, False


@contextmanager
def unheard(states: Sequence[Accumulation]) -> Iterator[list[Accumulation]]:
    """Backward inside tells no bucket that it is done. Behind it: who would have heard, as often as that."""
    before, heard = [(state._left, state._due) for state in states], list[Accumulation]()
    begin(states, MANY)
    begun = [state._left for state in states]
    try:
        yield heard
    finally:
        for state, left, kept in zip(states, begun, before, strict=True):
            heard += [state] * (left - state._left)
            state._left, state._due = kept


def attach(
    parameter: torch.nn.Parameter,
    main_grad: torch.Tensor,
    ready: Callable[[], None],
    missing: set[Accumulation] | None = None,
) -> Accumulation:
    """From now on gradients of `parameter` add into `main_grad`; `ready` is called after each backward.

    With `missing`, a set that several share: once all of those that somebody put there are done.

    The hook runs once in each backward, after all uses of the parameter, also when whoever used it has
    added into main_grad by hand and gave autograd nothing.
    """
    state = Accumulation(main_grad, ready, missing)
    parameter.main_grad = main_grad  # type: ignore[attr-defined]
    parameter.accumulation = state  # type: ignore[attr-defined]
    # The hook holds nothing: Python does not see what torch holds, and would never free a circle through it.
    parameter.register_post_accumulate_grad_hook(_accumulated)
    return state


def _accumulated(parameter: torch.Tensor) -> None:
    state: Accumulation = parameter.accumulation  # type: ignore[attr-defined]
    if parameter.grad is not None:
        state.add(parameter.grad)
        parameter.grad = None
    state.backward_done()


def accumulator(parameter: torch.nn.Parameter, begun: Grad = None) -> tuple[torch.Tensor, Grad]:
    """(where to add a gradient computed by hand, what to hand to autograd afterwards).

    With a main_grad autograd gets nothing; without one it gets a fresh gradient, zeros to begin with, so
    that a weight that was not used has a zero gradient and not None. `begun` is one that earlier parts of
    the same backward have added to.
    """
    main_grad: Grad = getattr(parameter, "main_grad", None)
    if main_grad is not None:
        state: Accumulation | None = getattr(parameter, "accumulation", None)
        if state is not None and state.empty:
            state.fill()
        return main_grad, None
    if begun is not None:
        return begun, begun
    grad = torch.zeros_like(parameter)
    return grad, grad


def are_first(parameters: Sequence[torch.nn.Parameter]) -> bool:
    """Whether gradients of all of them, which come together, are to be stored; otherwise all are added."""
    states = list(map(_state, parameters))
    first = all(state is not None and state.empty for state in states)
    for state in states:
        if state is not None and first:
            state.empty = False
        elif state is not None:
            state.fill()
    return first


def place_of(parameter: torch.nn.Parameter) -> Place | None:
    """For a kernel that writes the gradient itself, inside a backward that gives autograd nothing for it.

    None: there is no main_grad, and autograd takes the gradient.
    """
    main_grad: Grad = getattr(parameter, "main_grad", None)
    return None if main_grad is None else partial(_place, parameter, main_grad)


def _place(parameter: torch.nn.Parameter, main_grad: torch.Tensor) -> tuple[torch.Tensor, bool]:
    state = _state(parameter)
    return main_grad, state is None or not state.take_empty()


def _state(parameter: torch.nn.Parameter) -> Accumulation | None:
    return getattr(parameter, "accumulation", None)


def check_dtypes(operand: torch.dtype, into: torch.dtype) -> None:
    if into not in WIDER.get(operand, ()):
        choices = ", ".join(str(dtype) for dtype in WIDER.get(operand, ())) or "floating point"
        raise ConfigError(
            f"a weight gradient of {operand} operands cannot add into a main_grad of {into}; "
            f"give the parameter a main_grad of {choices}"
        )


def weight_grad(
    parameter: torch.nn.Parameter, dy_TN: torch.Tensor, x_TD: torch.Tensor, *, fuse: bool = True
) -> Grad:
    """dy^T x, added into main_grad inside the product; what autograd gets where it is not.

    Without `fuse`, or without a main_grad, the product is a tensor of its own.
    """
    into: Grad = getattr(parameter, "main_grad", None)
    if into is None or not fuse:
        return (dy_TN.t() @ x_TD).to(parameter.dtype)
    if into.dtype != dy_TN.dtype:
        check_dtypes(dy_TN.dtype, into.dtype)
    state: Accumulation | None = getattr(parameter, "accumulation", None)
    accumulate = state is None or not state.take_empty()
    if into.dtype == dy_TN.dtype or dy_TN.is_cuda:
        dense_wgrad(dy_TN, x_TD, into, accumulate=accumulate)
        return None
    for first in range(0, max(len(dy_TN), 1), CHUNK_ROWS):
        rows = slice(first, first + CHUNK_ROWS)
        dense_wgrad(dy_TN[rows], x_TD[rows], into, accumulate=accumulate or first > 0)
    return None


def bias_grad(parameter: torch.nn.Parameter, dy_TN: torch.Tensor, *, fuse: bool = True) -> Grad:
    """The sum of dy over tokens, in the accumulator's type; added into main_grad where there is one."""
    if getattr(parameter, "main_grad", None) is None or not fuse:
        return dy_TN.sum(0).to(parameter.dtype)
    into, _ = accumulator(parameter)
    check_dtypes(dy_TN.dtype, into.dtype)
    into.add_(dy_TN.sum(0, dtype=into.dtype))
    return None


@dataclass(frozen=True)
class _Queued:
    parameters: tuple[torch.nn.Parameter, ...]
    work: Work


class WeightGrads:
    """Runs weight gradients at once, or queues them until the schedule says W. One for a model.

    with grads.deferred(microbatch=0, stage=1):
        loss.backward()                          # input gradients alone
    ...
    grads.run(microbatch=0, stage=1)             # W
    """

    def __init__(self) -> None:
        self._key: tuple[int, int, str] | None = None
        self._queues: dict[tuple[int, int, str], list[_Queued]] = {}

    @property
    def deferring(self) -> bool:
        return self._key is not None

    @contextmanager
    def deferred(self, *, microbatch: int, stage: int = 0, part: str = "") -> Iterator[None]:
        """Backward inside this block queues its weight gradients; `part` names a piece of the stage."""
        if self._key is not None:
            raise ScheduleError(
                f"weight gradients of microbatch {microbatch}, stage {stage} cannot be deferred inside those "
                f"of microbatch {self._key[0]}, stage {self._key[1]}; leave that block first"
            )
        self._key = (microbatch, stage, part)
        try:
            yield
        finally:
            self._key = None

    def submit(self, parameters: Sequence[torch.nn.Parameter], work: Work) -> Sequence[Grad]:
        """What autograd gets for `parameters`; `work` gives it now, or is kept for W."""
        return work() if self._key is None else self._queue(self._key, parameters, work)

    def _queue(
        self, key: tuple[int, int, str], parameters: Sequence[torch.nn.Parameter], work: Work
    ) -> Sequence[Grad]:
        self._queues.setdefault(key, []).append(_Queued(tuple(parameters), work))
        for parameter in parameters:
            if (state := _state(parameter)) is not None:
                state.queued += 1
        return [None] * len(parameters)

    def submit_linears(
        self,
        parameters: Sequence[torch.nn.Parameter],
        wanted: Sequence[bool],
        dys_TN: Sequence[torch.Tensor],
        x_TD: torch.Tensor,
        num: int,
        *,
        fuse: bool,
    ) -> list[Grad]:
        """What autograd gets for each of `parameters`, `num` weights that take one input and then biases."""
        places = list(compress(range(len(parameters)), wanted))

        def work() -> list[Grad]:
            grads = []
            for place in places:
                if place < num:
                    grads.append(weight_grad(parameters[place], dys_TN[place], x_TD, fuse=fuse))
                else:
                    grads.append(bias_grad(parameters[place], dys_TN[place], fuse=fuse))
            return grads

        found: list[Grad] = [None] * len(parameters)
        if self._key is None:
            grads: Sequence[Grad] = work()
        else:
            grads = self._queue(self._key, [parameters[place] for place in places], work)
        for place, grad in zip(places, grads, strict=True):
            found[place] = grad
        return found

    @torch.no_grad()
    def run(self, *, microbatch: int, stage: int = 0, part: str = "") -> None:
        """W: everything that was queued under this key, in the order in which backward met it."""
        queue = self._queues.pop((microbatch, stage, part), None)
        if queue is None:
            known = ", ".join(f"({m}, {s}{', ' * bool(p)}{p})" for m, s, p in sorted(self._queues)) or "none"
            raise ScheduleError(
                f"no weight gradient of microbatch {microbatch}, stage {stage}{', ' * bool(part)}{part} is "
                f"queued; queued (microbatch, stage): {known}"
            )
        for item in queue:
            for parameter, grad in zip(item.parameters, item.work(), strict=True):
                _take(parameter, grad)

    def run_if_any(self, *, microbatch: int, stage: int = 0, part: str = "") -> None:
        """The same, where nothing may have been queued: a piece of a model without such weights."""
        if (microbatch, stage, part) in self._queues:
            self.run(microbatch=microbatch, stage=stage, part=part)

    def check_empty(self, named_parameters: Iterable[tuple[str, torch.nn.Parameter]] = ()) -> None:
        """Before the optimizer step: a gradient that never ran would be lost without a word."""
        if not self._queues:
            return
        names = {id(parameter): name for name, parameter in named_parameters}
        lost = [
            f"{names.get(id(parameter), f'a parameter of shape {tuple(parameter.shape)}')} "
            f"(microbatch {microbatch}, stage {stage}{', ' * bool(part)}{part})"
            for (microbatch, stage, part), queue in sorted(self._queues.items())
            for item in queue
            for parameter in item.parameters
        ]
        shown = ", ".join(lost[:8]) + (f" and {len(lost) - 8} more" if len(lost) > 8 else "")
        raise ScheduleError(
            f"{len(lost)} weight gradients were deferred and never ran: {shown}; "
            "run W for them before the optimizer step"
        )


@torch.no_grad()
def deliver(parameter: torch.nn.Parameter, grad: Grad) -> None:
    """A gradient of which autograd knows nothing; None where it is in main_grad already."""
    if not parameter.requires_grad:
        return
    add_grad(parameter, grad)
    state = _state(parameter)
    if state is not None:
        state.backward_done()


def _take(parameter: torch.nn.Parameter, grad: Grad) -> None:
    """What autograd and the hook would have done with a gradient that came in time."""
    add_grad(parameter, grad)
    state = _state(parameter)
    if state is not None:
        state.queued -= 1
        state.backward_done(0)


def add_grad(parameter: torch.nn.Parameter, grad: Grad) -> None:
    """To its accumulator, or to its `.grad`; inside a backward that gives autograd nothing for it."""
    if grad is None:
        return
    state = _state(parameter)
    if state is not None:
        state.add(grad)
    elif parameter.grad is None:
        parameter.grad = grad
    else:
        parameter.grad += grad
