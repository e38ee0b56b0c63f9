"""Tensor-parallel linears against one process: outputs and every raw gradient, in every mode."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import ConfigError
from moeclipse.ops.random import fill_normal
from moeclipse.tensor.cut import Cut, cut_of
from moeclipse.tensor.linear import ColumnParallelLinear, RowParallelLinear, column_linear
from moeclipse.tensor.parallel import TensorParallel
from moeclipse.tensor.weight_grad import attach
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_alone, run_ranks

D, WIDE, T, MICROBATCHES = 12, 20, 8, 3
BOUND = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 4e-2}


def modes() -> list[dict[str, Any]]:
    """Sequence parallel x async x fusion; async all-reduce with sequence parallel is refused elsewhere."""
    found = []
    for sequence, overlap, fuse in itertools.product([False, True], repeat=3):
        mode: dict[str, Any] = {"sequence_parallel": sequence, "overlap": overlap, "fuse": fuse}
        if not sequence:
            mode["async_all_reduce"] = overlap
        found.append(mode)
    return found


def data(microbatch: int, dtype: torch.dtype, shape: tuple[int, ...] = (T, 2)) -> tuple[torch.Tensor, ...]:
    x = fill_normal(torch.empty(*shape, D, dtype=torch.float64), 10 + microbatch, 1.0)
    d_y = fill_normal(torch.empty(*shape, D, dtype=torch.float64), 20 + microbatch, 1.0)
    return x.to(dtype), d_y.to(dtype)


def layers(tp: TensorParallel, bias: bool, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    options: dict[str, Any] = {"tp": tp, "bias": bias, "init_std": 0.3, "dtype": dtype}
    column = ColumnParallelLinear(D, WIDE, name="up", key=3, **options)
    row = RowParallelLinear(WIDE, D, name="down", key=4, **options)
    if bias:
        with torch.no_grad():
            cut = cut_of(column.bias)
            cut.fill(column.bias, 5, 0.5)
            fill_normal(row.bias.data, 6, 0.5)
    return column, row


def logical(name: str, parameter: nn.Parameter, grad: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
    """The gradient of the logical tensor, from all ranks' parts."""
    cut = cut_of(parameter)
    if cut is not None:
        whole = grad.new_zeros(cut.shape)
        at = [slice(None)] * len(cut.shape)
        at[cut.dim] = slice(cut.start, cut.stop)
        whole[tuple(at)] = grad
        return tp.sum_rows(whole, name).get()
    return tp.sum_rows(grad.clone(), name).get() if tp.parts_tokens else grad


def run(mesh: Mesh, mode: dict[str, Any], bias: bool, dtype: torch.dtype, deferred: bool = False) -> dict:
    """Three microbatches through column, gelu, row; what the ranks hold together, as logical tensors."""
    tp = TensorParallel.of(mesh, **mode)
    column, row = layers(tp, bias, dtype)
    named = [
        (f"{part}.{key}", p) for part, m in (("up", column), ("down", row)) for key, p in m.named_parameters()
    ]
    sums = {}
    for name, parameter in named:
        wide = torch.promote_types(parameter.dtype, torch.float32)
        sums[name] = torch.zeros(parameter.shape, dtype=wide)
        attach(parameter, sums[name], lambda: None)
    found: dict[str, torch.Tensor] = {}
    for m in range(MICROBATCHES):
        x, d_y = data(m, dtype)
        if tp.parts_tokens:
            share = slice(tp.index * T // tp.size, (tp.index + 1) * T // tp.size)
            x, d_y = x[share], d_y[share]
        x = x.clone().requires_grad_()
        y = row(F.gelu(column(x)))
        if deferred:
            with tp.wgrads.deferred(microbatch=m):
                y.backward(d_y)
        else:
            y.backward(d_y)
        for name, value in (("y", y.detach()), ("d_x", x.grad)):
            found[f"{name}.{m}"] = tp.gather_rows(value, name).get() if tp.parts_tokens else value
    if deferred:
        for m in range(MICROBATCHES):
            tp.wgrads.run(microbatch=m)
        tp.wgrads.check_empty()
    for name, parameter in named:
        assert parameter.grad is None
        found[name] = logical(name, parameter, sums[name], tp)
    return {name: value.clone() for name, value in found.items()}


def reference(mesh: Mesh, bias: bool, dtype: torch.dtype) -> dict:
    """The same from plain autograd in float64."""
    column, row = layers(TensorParallel.of(mesh), bias, dtype)
    plain = {f"up.{k}": p for k, p in column.named_parameters()}
    plain |= {f"down.{k}": p for k, p in row.named_parameters()}
    plain = {name: p.detach().double().requires_grad_() for name, p in plain.items()}
    found: dict[str, torch.Tensor] = {}
    for m in range(MICROBATCHES):
        x, d_y = (t.double() for t in data(m, dtype))
        x.requires_grad_()
        h = F.gelu(F.linear(x, plain["up.weight"], plain.get("up.bias")))
        y = F.linear(h, plain["down.weight"], plain.get("down.bias"))
        y.backward(d_y)
        found |= {f"y.{m}": y.detach(), f"d_x.{m}": x.grad}
    return found | {name: p.grad for name, p in plain.items()}


def compare(found: dict, expected: dict, bound: float) -> None:
    assert found.keys() == expected.keys()
    bad = {name: difference(found[name], expected[name]) for name in expected}
    assert all(value <= bound for value in bad.values()), bad


def run_all(mesh: Mesh, bias: bool, dtype: torch.dtype) -> list[dict]:
    return [run(mesh, mode, bias, dtype) for mode in modes()]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_gradients_equal_one_process(tp: int, bias: bool, dtype: torch.dtype) -> None:
    expected = run_alone(reference, bias, dtype)
    for results in run_ranks(tp, run_all, bias, dtype, tp=tp):
        for found in results:
            compare(found, expected, BOUND[dtype])


def run_deferred(mesh: Mesh, dtype: torch.dtype) -> list[tuple[dict, dict]]:
    return [(run(mesh, mode, True, dtype), run(mesh, mode, True, dtype, deferred=True)) for mode in modes()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_deferral_changes_no_bit(dtype: torch.dtype) -> None:
    for results in run_ranks(2, run_deferred, dtype, tp=2):
        for now, later in results:
            assert now.keys() == later.keys()
            assert all(torch.equal(now[name], later[name]) for name in now)


def gathered(mesh: Mesh) -> tuple[torch.Tensor, ...]:
    """gather_output and input_is_parallel=False: every rank sees whole inputs and outputs."""
    tp = TensorParallel.of(mesh)
    options: dict[str, Any] = {"tp": tp, "init_std": 0.3, "dtype": torch.float64}
    column = ColumnParallelLinear(D, WIDE, gather_output=True, key=3, **options)
    row = RowParallelLinear(WIDE, D, input_is_parallel=False, key=4, **options)
    x, d_y = data(0, torch.float64)
    x = x.clone().requires_grad_()
    h = column(x)
    y = row(h)
    y.backward(d_y)
    parts = [logical("w", layer.weight, layer.weight.grad, tp) for layer in (column, row)]
    return h.detach(), y.detach(), x.grad, *parts


def test_whole_inputs_and_outputs() -> None:
    expected = run_alone(gathered)
    for found in run_ranks(4, gathered, tp=4):
        assert all(difference(a, b) <= 1e-12 for a, b in zip(found, expected, strict=True))


def several(mesh: Mesh, sequence_parallel: bool) -> dict:
    """Three weights of unequal width on one input; the second is frozen, the third is used twice."""
    tp = TensorParallel.of(mesh, sequence_parallel=sequence_parallel)
    weights, sums = [], {}
    for number, width in enumerate([5, 7, 6]):
        cut = Cut.of((width, D), 0, index=tp.index, parts=tp.size)
        weight = nn.Parameter(torch.empty(cut.local_shape, dtype=torch.float64))
        weight.tensor_share = cut
        cut.fill(weight.data, number, 0.5)
        weights.append(weight)
    weights[1].requires_grad_(False)
    attach(weights[2], sums.setdefault(2, torch.zeros_like(weights[2])), lambda: None)
    x, _ = data(0, torch.float64, (T,))
    if tp.parts_tokens:
        x = x[tp.index * T // tp.size : (tp.index + 1) * T // tp.size]
    x = x.clone().requires_grad_()
    outputs = column_linear(x, [*weights, weights[2]], tp)
    sum((y.square() * (n + 1)).sum() for n, y in enumerate(outputs)).backward()
    assert weights[1].grad is None
    assert weights[2].grad is None
    whole = tp.gather_rows(x.grad, "d_x").get() if tp.parts_tokens else x.grad
    return {
        "d_x": whole,
        "w0": logical("w0", weights[0], weights[0].grad, tp),
        "w2": logical("w2", weights[2], sums[2], tp),
    }


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_several_weights_of_one_input_frozen_and_tied(sequence_parallel: bool) -> None:
    expected = run_alone(several, False)
    for found in run_ranks(4, several, sequence_parallel, tp=4):
        compare(found, expected, 1e-12)


def recomputed(mesh: Mesh, sequence_parallel: bool) -> list[torch.Tensor]:
    results = []
    for recompute in (False, True):
        tp = TensorParallel.of(mesh, sequence_parallel=sequence_parallel)
        column, row = layers(tp, True, torch.float32)
        x, d_y = data(0, torch.float32)
        rows = slice(0, T // tp.size) if tp.parts_tokens else slice(None)
        x = x[rows].clone().requires_grad_()

        def block(x: torch.Tensor, column: nn.Module = column, row: nn.Module = row) -> torch.Tensor:
            return row(F.gelu(column(x)))

        y = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
        y.backward(d_y[rows])
        results.append([x.grad, *(p.grad for m in (column, row) for p in m.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    return results[0]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_recompute_changes_no_bit(sequence_parallel: bool) -> None:
    run_ranks(2, recomputed, sequence_parallel, tp=2)


def autocast(mesh: Mesh) -> None:
    column, row = layers(TensorParallel.of(mesh), True, torch.float32)
    x, d_y = data(0, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = row(F.gelu(column(x.requires_grad_())))
    y.backward(d_y.to(y.dtype))
    plain = [nn.Linear(D, WIDE), nn.Linear(WIDE, D)]
    for layer, like in zip(plain, (column, row), strict=True):
        layer.weight.data, layer.bias.data = like.weight.data, like.bias.data
    z = x.detach().clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = plain[1](F.gelu(plain[0](z)))
    expected.backward(d_y.to(expected.dtype))
    assert y.dtype == expected.dtype == torch.bfloat16
    assert column.weight.grad.dtype == torch.float32
    assert difference(y, expected) < 2e-2
    assert difference(x.grad, z.grad) < 2e-2
    assert difference(row.weight.grad, plain[1].weight.grad) < 2e-2
    assert difference(column.bias.grad, plain[0].bias.grad) < 2e-2


def test_autocast_runs_in_its_type() -> None:
    run_alone(autocast)


def compiled(mesh: Mesh) -> None:
    column, row = layers(TensorParallel.of(mesh), False, torch.float32)
    x, _ = data(0, torch.float32)

    def block(x: torch.Tensor) -> torch.Tensor:
        return row(F.gelu(column(x * 2))) + 1

    assert torch.equal(torch.compile(block, backend="eager")(x), block(x))


def test_compiled_models_run_these_eagerly() -> None:
    run_alone(compiled)


class Largest(TorchDispatchMode):
    """The largest tensor that an operation newly allocates."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {
            t.untyped_storage().data_ptr()
            for t in [*args, *(kwargs or {}).values()]
            if isinstance(t, torch.Tensor)
        }
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in known:
                self.numel = max(self.numel, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out


def temporaries(mesh: Mesh, fuse: bool, dtype: torch.dtype) -> int:
    """Elements of the largest tensor made in backward of a linear with few tokens and a large weight."""
    layer = ColumnParallelLinear(256, 256, tp=TensorParallel.of(mesh, fuse=fuse), dtype=dtype)
    attach(layer.weight, torch.zeros(256, 256), lambda: None)
    x = torch.ones(16, 256, dtype=dtype, requires_grad=True)
    y = layer(x)
    with Largest() as largest:
        y.backward(torch.ones_like(y))
    return largest.numel


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_fused_gradient_needs_no_temporary_of_the_weights_size(dtype: torch.dtype) -> None:
    assert run_alone(temporaries, False, dtype) == 256 * 256, "the probe must see what it looks for"
    assert run_alone(temporaries, True, dtype) <= 16 * 256


def expanded(mesh: Mesh) -> None:
    layer = ColumnParallelLinear(D, WIDE, tp=TensorParallel.of(mesh), bias=True, dtype=torch.float64)
    main_grad = torch.zeros_like(layer.weight)
    attach(layer.weight, main_grad, lambda: None)
    x, _ = data(0, torch.float64)
    layer(x).sum().backward()  # a gradient with stride 0
    assert difference(main_grad, x.flatten(0, 1).sum(0).expand(WIDE, -1)) < 1e-12
    y = layer(x)
    y.backward(torch.ones(WIDE, 2, T, dtype=torch.float64).permute(2, 1, 0))
    assert difference(main_grad, 2 * x.flatten(0, 1).sum(0).expand(WIDE, -1)) < 1e-12


def test_gradients_that_are_not_contiguous() -> None:
    run_alone(expanded)


def test_what_cannot_work_is_refused_with_a_reason() -> None:
    for message in run_ranks(2, refusals, tp=2):
        assert message == [
            "gather_output = True needs sequence_parallel = False: every rank would hold all tokens with all "
            "features, which sequence parallelism exists to avoid",
            "input_is_parallel = False needs sequence_parallel = False: ranks hold different tokens, so "
            "their features cannot be shared out; put a column-parallel linear before this one",
            "gather_output needs d_out (5) to be a multiple of tp (2)",
            "input_is_parallel = False needs d_in (5) to be a multiple of tp (2)",
            "d_out of column (1) has 1 units to be cut, fewer than the 2 ranks of tp; choose a smaller tp",
            "3 rows cannot be shared out evenly over tp (2); sequence parallelism needs a number of tokens "
            "that tp divides",
        ]


def refusals(mesh: Mesh) -> list[str]:
    parts, whole = TensorParallel.of(mesh, sequence_parallel=True), TensorParallel.of(mesh)
    calls = [
        lambda: ColumnParallelLinear(4, 4, tp=parts, gather_output=True),
        lambda: RowParallelLinear(4, 4, tp=parts, input_is_parallel=False),
        lambda: ColumnParallelLinear(4, 5, tp=whole, gather_output=True),
        lambda: RowParallelLinear(5, 4, tp=whole, input_is_parallel=False),
        lambda: ColumnParallelLinear(4, 1, tp=whole),
        lambda: RowParallelLinear(4, 4, tp=parts)(torch.ones(3, 2)),
    ]
    messages = []
    for call in calls:
        with pytest.raises(ConfigError) as caught:
            call()
        messages.append(str(caught.value))
    return messages
