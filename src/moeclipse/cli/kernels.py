"""What `moeclipse doctor` says about the experts' kernels: in which form they run here, and how fast that is.

A layer of a usual shape goes forward and backward by kernels and in plain torch, in turns. Results that
differ by more than rounding are a fault of the device, its driver or its compiler, and are told instead.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moeclipse.cli.checks import Finding

if TYPE_CHECKING:
    import torch

    from moeclipse.moe.layer import MoE

SECTION = "kernels"
PATIENCE_S = 6.0
"""Of the measurement, behind the first call of each, which compiles."""
ROUNDS = 9
ROUNDING = 0.02
"""Of the largest number: what two ways of adding up bf16 products may differ by."""


@dataclass(frozen=True, kw_only=True)
class TriedLayer:
    """Of the layer that is tried."""

    tokens: int = 8192
    d_model: int = 2048
    d_ff: int = 768
    experts: int = 32
    top_k: int = 8

    @property
    def flops(self) -> float:
        """Of the products of forward and backward."""
        return 18.0 * self.tokens * self.top_k * self.d_model * self.d_ff

    def __str__(self) -> str:
        return f"{self.tokens} tokens x {self.top_k} of {self.experts} experts, {self.d_model} x {self.d_ff}"


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Medians of forward and backward, and by how much of the largest number results differ."""

    kernels_s: float
    plain_s: float
    difference: float


def kernels(shape: TriedLayer | None = None) -> Iterator[Finding]:
    """Of the first device; other devices of a machine are nearly always alike."""
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    from moeclipse.ops.architecture import architecture_of

    if not torch.cuda.is_available():
        value = "experts compute in plain torch, as everywhere without a GPU"
        yield Finding(section=SECTION, name="experts", state="info", value=value)
        return
    device = torch.device("cuda", 0)
    architecture, shape = architecture_of(device), shape or TriedLayer()
    if architecture is None:
        value = f"experts compute in plain torch on {torch.cuda.get_device_name(device)}"
        advice = "the kernels need Triton and a GPU from Ampere on, or an MI300X"
        yield Finding(section=SECTION, name="experts", state="limited", value=value, advice=advice)
        return
    form = f"{architecture.form} form for {architecture.name}"
    try:
        yield finding(form, shape, measure(shape, device))
    except torch.cuda.OutOfMemoryError:
        advice = f"free some memory to measure them ({shape})"
        yield Finding(
            section=SECTION, name="experts", state="works", value=f"{form}, not measured", advice=advice
        )
    except Exception as error:  # a compiler or driver may fail in any way
        value = f"{form} fails: {str(error).partition(chr(10))[0][:120]}"
        advice = "train with --moe.kernels off, and report this"
        yield Finding(section=SECTION, name="experts", state="limited", value=value, advice=advice)


def finding(form: str, shape: TriedLayer, speed: Speed) -> Finding:
    by_kernels, plain = (1e-12 * shape.flops / s for s in (speed.kernels_s, speed.plain_s))
    value = (
        f"{form}: {by_kernels:.0f} TFLOP/s forward and backward, plain torch {plain:.0f} "
        f"({speed.plain_s / speed.kernels_s:.2f} times as fast; {shape})"
    )
    if not speed.difference < ROUNDING:  # nan is no rounding either
        value = f"{form}: results differ from plain torch by {speed.difference:.2g} of the largest number"
        advice = "train with --moe.kernels off, and report this with the versions above"
        return Finding(section=SECTION, name="experts", state="broken", value=value, advice=advice)
    if speed.kernels_s > speed.plain_s:
        advice = "slower than plain torch here: try --moe.kernels off, or `moeclipse.ops.tuning.tune`"
        return Finding(section=SECTION, name="experts", state="limited", value=value, advice=advice)
    return Finding(section=SECTION, name="experts", state="works", value=value)


def measure(shape: TriedLayer, device: torch.device) -> Speed:
    """By kernels (on CPU: by plain torch, too) and by plain torch, in turns."""
    import torch

    from moeclipse.moe.layer import MoE

    made = [
        MoE(
            shape.d_model,
            shape.d_ff,
            shape.experts,
            shape.top_k,
            exchange={"kernels": kind},
            device=device,
            dtype=torch.bfloat16,
        )
        for kind in ("auto", "off")
    ]
    drawn = torch.Generator(device).manual_seed(0)
    x_TD, d_TD = (
        torch.randn(shape.tokens, shape.d_model, generator=drawn, device=device, dtype=torch.bfloat16)
        for _ in range(2)
    )
    results = [results_of(layer, x_TD, d_TD) for layer in made]
    pairs = zip(*results, strict=True)
    differences = [float((mine - other).abs().max() / other.abs().max()) for mine, other in pairs]
    seconds: tuple[list[float], list[float]] = ([], [])
    began = time.perf_counter()
    while len(seconds[0]) < ROUNDS and (not seconds[0] or time.perf_counter() - began < PATIENCE_S):
        for layer, taken in zip(made, seconds, strict=True):
            taken.append(timed(layer, x_TD, d_TD))
    kernels_s, plain_s = map(statistics.median, seconds)
    worst = max(differences, key=lambda one: float("inf") if one != one else one)
    return Speed(kernels_s=kernels_s, plain_s=plain_s, difference=worst)


def results_of(layer: MoE, x_TD: torch.Tensor, d_TD: torch.Tensor) -> list[torch.Tensor]:
    """Output and all gradients, in fp32."""
    x_TD = x_TD.detach().requires_grad_()
    y_TD = layer(x_TD)
    y_TD.backward(d_TD)
    grads = [parameter.grad for parameter in layer.experts.parameters()]
    layer.zero_grad(set_to_none=True)
    return [each.detach().float() for each in (y_TD, x_TD.grad, *grads) if each is not None]


def timed(layer: MoE, x_TD: torch.Tensor, d_TD: torch.Tensor) -> float:
    """Seconds of forward and backward."""
    import torch

    def wait() -> None:
        if x_TD.is_cuda:
            torch.cuda.synchronize()

    x_TD = x_TD.detach().requires_grad_()
    wait()
    began = time.perf_counter()
    layer(x_TD).backward(d_TD)
    wait()
    taken = time.perf_counter() - began
    layer.zero_grad(set_to_none=True)
    return taken
