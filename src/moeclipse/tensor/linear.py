"""Linears whose weight is cut over the tp ranks, and whose communication hides behind their own products.

A column-parallel linear holds rows of W (some outputs), a row-parallel one columns (some inputs); one after
the other they need one exchange in forward and one in backward. In backward the exchange and the products
interleave:

    column, replicated         dgrad | all-reduce d_x      under  wgrad
    column, sequence parallel  gather x  under  dgrad      | reduce-scatter d_x  under  wgrad
    row, sequence parallel     gather dy | dgrad, wgrad    (both products need the gathered dy)

Contract. `column_linear` takes several weights that read the same input (queries, keys, values): the input
is gathered once, and its gradient is reduced once, under all their weight gradients. Only this rank's part
of the input is saved for backward; gathering goes into one buffer that all layers share. Inputs may have
any number of leading dimensions; with sequence parallelism the first one is what is shared out. Under
autocast products run in its type and gradients add into main_grad as usual. Activation recompute works:
every rank repeats the same exchanges. Inside `torch.compile` these functions run eagerly (a graph break),
because the order of exchanges and products is the point of them.

On one rank a weight may be `Frozen` (`ops/frozen`): its numbers are decoded for each product, forward and
backward, and only those of one weight at a time are there.

Hazard. Ranks that call in different orders exchange the wrong tensors: every tp rank runs the same layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from moeclipse.comm.async_ops.lane import InFlight
from moeclipse.core.errors import ConfigError
from moeclipse.ops.first_order import first_order
from moeclipse.ops.frozen import Frozen, Weight
from moeclipse.tensor.cut import Cut, mark
from moeclipse.tensor.parallel import TensorParallel, move

P = ParamSpec("P")
R = TypeVar("R")


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """The same function, which no compiled graph holds: one ends before it, and another begins behind.

    `torch.compiler.disable` says the same, but loads the compiler when a function is defined: half a second
    of every process, on each rank, for those who compile nothing.
    """

    @wraps(function)
    def outside(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            found: R = torch.compiler.disable(function)(*args, **kwargs)
            return found
        return function(*args, **kwargs)

    return outside


@eager
def column_linear(
    x: torch.Tensor,
    weights: Sequence[nn.Parameter | Frozen],
    tp: TensorParallel,
    biases: Sequence[nn.Parameter | None] | None = None,
    label: str = "column-parallel linear",
) -> list[torch.Tensor]:
    """x W^T + b for each weight, where each rank holds some rows of every W."""
    biases = biases or [None] * len(weights)
    outputs = _Column.apply(cast(x), tp, label, len(weights), *weights, *biases)
    return list(outputs)


@eager
def row_linear(
    x: torch.Tensor,
    weight: nn.Parameter | Frozen,
    tp: TensorParallel,
    bias: nn.Parameter | None = None,
    label: str = "row-parallel linear",
) -> torch.Tensor:
    """x W^T + b, where each rank holds some columns of W and the same columns of x."""
    out: torch.Tensor = _Row.apply(cast(x), tp, label, weight, bias)
    return out


def cast(x: torch.Tensor) -> torch.Tensor:
    """Autocast does not see inside an autograd function: do what it would do."""
    if torch.is_autocast_enabled(x.device.type):
        return x.to(torch.get_autocast_dtype(x.device.type))
    return x


def _operand(weight: Weight, x: torch.Tensor) -> torch.Tensor:
    if isinstance(weight, Frozen):
        return weight.numbers(x.dtype)
    return weight.to(x.dtype) if torch.is_autocast_enabled(x.device.type) else weight


def _keep(ctx: Any, x: torch.Tensor, weights: Sequence[Weight]) -> None:
    """For backward; of what is frozen no numbers are kept."""
    tensors, ctx.frozen = [x], {}
    for place, weight in enumerate(weights):
        if isinstance(weight, Frozen):
            ctx.frozen[place] = weight
        else:
            tensors.append(weight)
    ctx.save_for_backward(*tensors)


def _kept(ctx: Any) -> tuple[torch.Tensor, list[Weight]]:
    x, *weights = ctx.saved_tensors
    for place, weight in ctx.frozen.items():
        weights.insert(place, weight)
    return x, weights


def _d_input(dy_TN: torch.Tensor, weight: Weight) -> torch.Tensor:
    return weight.numbers(dy_TN.dtype) if isinstance(weight, Frozen) else weight.to(dy_TN.dtype)


class _Column(torch.autograd.Function):
    """
    forward    y_i = [gather] x W_i^T + b_i
    dgrad      dx  = [all-reduce | reduce-scatter] sum_i dy_i W_i
    wgrad      dW_i += dy_i^T [gather] x,   db_i += sum dy_i
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, tp: TensorParallel, label: str, num: int, *parameters: Any
    ) -> tuple[torch.Tensor, ...]:
        weights, biases = parameters[:num], parameters[num:]
        ctx.tp, ctx.label, ctx.num, ctx.biases = tp, label, num, biases
        _keep(ctx, x, weights)
        whole = tp.gather_rows(x, f"gather of inputs, {label}", reuse=True).get() if tp.parts_tokens else x
        ys = []
        for weight, bias in zip(weights, biases, strict=True):
            ys.append(F.linear(whole, _operand(weight, x), None if bias is None else _operand(bias, x)))
        return tuple(ys)

    @staticmethod
    @first_order
    def backward(ctx: Any, *dys: torch.Tensor) -> tuple[Any, ...]:
        tp, label, num = ctx.tp, ctx.label, ctx.num
        x, weights = _kept(ctx)
        shape = x.shape
        wanted = list(ctx.needs_input_grad[4:])
        whole: InFlight[torch.Tensor] | None = None
        if tp.parts_tokens and any(wanted[:num]):
            reuse = not tp.wgrads.deferring  # what waits for W must not be overwritten
            whole = tp.gather_rows(x, f"backward gather of inputs, {label}", reuse=reuse)
            if whole is not None and not tp.overlap:
                whole.get()
        dys_TN = [dy.reshape(-1, dy.shape[-1]) for dy in dys]
        d_x: torch.Tensor | None = None
        travelling: InFlight[torch.Tensor] | None = None
        if ctx.needs_input_grad[0]:
            d_x = dys_TN[0] @ _d_input(dys_TN[0], weights[0])
            for dy_TN, weight in zip(dys_TN[1:], weights[1:], strict=True):
                d_x.addmm_(dy_TN, _d_input(dy_TN, weight))
        # The gather must have ended before the next transfer may take the wire.
        x = x if whole is None else whole.get()
        x_TD = x.reshape(-1, x.shape[-1])
        if d_x is not None and tp.size > 1:
            travelling = reduce_input_grad(tp, d_x, label)
        parameters = [*weights, *ctx.biases]
        grads = tp.wgrads.submit_linears(parameters, wanted, [*dys_TN, *dys_TN], x_TD, num, fuse=tp.fuse)
        if travelling is not None:
            d_x = travelling.get()
        return d_x.view(shape) if d_x is not None else None, None, None, None, *grads


def reduce_input_grad(tp: TensorParallel, d_x: torch.Tensor, label: str) -> InFlight[torch.Tensor]:
    """Start to sum d_x over tp: all of it, or this rank's part of its rows."""
    if tp.parts_tokens:
        travelling, hidden = tp.sum_scatter_rows(d_x, f"reduce-scatter of d_x, {label}"), tp.overlap
    else:
        travelling, hidden = tp.sum_rows(d_x, f"all-reduce of d_x, {label}"), tp.hides_all_reduce
    if not hidden:
        travelling.get()
    return travelling


class _Row(torch.autograd.Function):
    """
    forward    y  = [all-reduce | reduce-scatter] x W^T, then + b
    dgrad      dx = [gather] dy W
    wgrad      dW += [gather] dy^T x,   db += sum dy  (of this rank's tokens)
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, tp: TensorParallel, label: str, weight: Any, bias: Any
    ) -> torch.Tensor:
        ctx.tp, ctx.label, ctx.bias = tp, label, bias
        _keep(ctx, x, [weight])
        y = F.linear(x, _operand(weight, x))
        if tp.parts_tokens:
            y = tp.sum_scatter_rows(y, f"reduce-scatter of outputs, {label}").get()
        elif tp.size > 1:
            y = tp.sum_rows(y, f"all-reduce of outputs, {label}").get()
        return y if bias is None else y + bias.to(y.dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        tp = ctx.tp
        x, (weight,) = _kept(ctx)
        whole = dy
        if tp.parts_tokens:
            reuse = not tp.wgrads.deferring
            whole = tp.gather_rows(dy, f"backward gather of outputs, {ctx.label}", reuse=reuse).get()
        whole_TN = whole.reshape(-1, whole.shape[-1])
        d_x = None
        if ctx.needs_input_grad[0]:
            d_x = (whole_TN @ _d_input(dy, weight)).view(x.shape)
        dys = [whole_TN, dy.reshape(-1, dy.shape[-1])]
        parameters, wanted = [weight, ctx.bias], ctx.needs_input_grad[3:]
        grads = tp.wgrads.submit_linears(parameters, wanted, dys, x.reshape(-1, x.shape[-1]), 1, fuse=tp.fuse)
        return d_x, None, None, *grads


class _Parallel(nn.Module):
    """Weight, bias and their marks; initial weights depend on the key alone, never on the layout."""

    def __init__(
        self,
        cut: Cut,
        tp: TensorParallel,
        *,
        bias: torch.Tensor | None,
        key: int,
        name: str,
        init_std: float,
        device: torch.device | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.tp, self.name = tp, name
        self.weight = mark(nn.Parameter(torch.empty(cut.local_shape, device=device, dtype=dtype)), cut)
        cut.fill(self.weight.data, key, init_std)
        self.bias = None if bias is None else nn.Parameter(bias)


class ColumnParallelLinear(_Parallel):
    """y = x W^T + b: this rank computes some of the outputs, or all of them with `gather_output`."""

    def __init__(
        self,
        d_in: int,
        d_out: int,
        *,
        tp: TensorParallel,
        bias: bool = False,
        gather_output: bool = False,
        unit: int = 1,
        blocks: int = 1,
        key: int = 0,
        name: str = "column",
        init_std: float = 0.02,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if gather_output and tp.parts_tokens:
            raise ConfigError(
                "gather_output = True needs sequence_parallel = False: every rank would hold all tokens with "
                "all features, which sequence parallelism exists to avoid"
            )
        if gather_output and d_out % tp.size:
            raise ConfigError(f"gather_output needs d_out ({d_out}) to be a multiple of tp ({tp.size})")
        cut_by: dict[str, Any] = {"index": tp.index, "parts": tp.size, "blocks": blocks, "unit": unit}
        cut = Cut.of((d_out, d_in), 0, **cut_by, what=f"d_out of {name}")
        zeros = torch.zeros(cut.local_shape[0], device=device, dtype=dtype) if bias else None
        options: dict[str, Any] = {"key": key, "name": name, "init_std": init_std}
        super().__init__(cut, tp, bias=zeros, device=device, dtype=dtype, **options)
        if self.bias is not None:
            mark(self.bias, Cut.of((d_out,), 0, **cut_by))
        self.gather_output = gather_output

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (y,) = column_linear(x, [self.weight], self.tp, [self.bias], self.name)
        if self.gather_output:
            return move(y, self.tp, "gather_columns", "slice_columns", f"gather of outputs, {self.name}")
        return y


class RowParallelLinear(_Parallel):
    """y = x W^T + b: this rank has some of the inputs; outputs are summed over ranks."""

    def __init__(
        self,
        d_in: int,
        d_out: int,
        *,
        tp: TensorParallel,
        bias: bool = False,
        input_is_parallel: bool = True,
        unit: int = 1,
        key: int = 0,
        name: str = "row",
        init_std: float = 0.02,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if not input_is_parallel and tp.parts_tokens:
            raise ConfigError(
                "input_is_parallel = False needs sequence_parallel = False: ranks hold different tokens, so "
                "their features cannot be shared out; put a column-parallel linear before this one"
            )
        if not input_is_parallel and d_in % tp.size:
            raise ConfigError(
                f"input_is_parallel = False needs d_in ({d_in}) to be a multiple of tp ({tp.size})"
            )
        cut = Cut.of((d_out, d_in), 1, index=tp.index, parts=tp.size, unit=unit, what=f"d_in of {name}")
        zeros = torch.zeros(d_out, device=device, dtype=dtype) if bias else None
        options: dict[str, Any] = {"key": key, "name": name, "init_std": init_std}
        super().__init__(cut, tp, bias=zeros, device=device, dtype=dtype, **options)
        if self.bias is not None:
            mark(self.bias, tp.whole_share)
        self.input_is_parallel = input_is_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.input_is_parallel:
            x = move(x, self.tp, "slice_columns", "gather_columns", f"parts of inputs, {self.name}")
        return row_linear(x, self.weight, self.tp, self.bias, self.name)
