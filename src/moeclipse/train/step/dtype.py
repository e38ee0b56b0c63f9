"""In which type a run computes, and whether two of them give the same bits.

What changes bits from run to run, and what `run.deterministic` has to do with it:

    torch's kernels    on CUDA attention's backward adds up gradients of queries in the order in which they
                       happen to be there; `repeat_bits` takes the slower form that does not
    choices by time    how rows are cut, which experts are lent and where they live decide how many rows a
                       product has and in which order sums are added; where bits repeat, they are made from
                       counts and fixed prices (`moe/tune/fixed_prices`), never from this run's clock

On a CPU products of torch repeat their bits anyway, so that there runs do unless they are told not to.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from moeclipse.moe.layer import MoE


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def repeats(asked: bool | str, device: torch.device) -> bool:
    """Whether a run with this `run.deterministic` promises equal bits on this device."""
    return device.type == "cpu" if asked == "auto" else bool(asked)


def choose_alike(layers: Iterable[MoE], asked: bool | str, device: torch.device) -> None:
    """Let layers choose by the book where bits are promised."""
    for layer in layers:
        layer.schedule.by_the_book = repeats(asked, device)


def repeat_bits(asked: bool | str, device: torch.device) -> None:
    """From now on, in this process: torch takes kernels whose sums have one order, where that is promised."""
    if device.type != "cuda" or not repeats(asked, device):
        return
    # Of attention: cuDNN's backward does not promise it, the others' do.
    torch.backends.cuda.enable_cudnn_sdp(False)
    # Told to warn only, attention warns and takes the fast form. So it is an error to have no such kernel.
    torch.use_deterministic_algorithms(True)
    # Otherwise all memory is written before it is used, to find those who read it too early.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
