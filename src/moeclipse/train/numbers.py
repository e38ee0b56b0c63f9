"""In which type a run computes, and whether two of them give the same bits.

On a CPU they do. On CUDA all kernels of ours do, and attention's backward, which is torch's, does not: its
fastest form adds up gradients of queries in the order in which they happen to be there. `run.deterministic`
takes the form that does not.
"""

from __future__ import annotations

import torch


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def repeat_bits(asked: bool, device: torch.device) -> None:
    """From now on, in this process: torch takes kernels whose sums have one order."""
    if not asked or device.type != "cuda":
        return
    # Of attention: cuDNN's backward does not promise it, the others' do.
    torch.backends.cuda.enable_cudnn_sdp(False)
    # Told to warn only, attention warns and takes the fast form. So it is an error to have no such kernel.
    torch.use_deterministic_algorithms(True)
    # Otherwise all memory is written before it is used, to find those who read it too early.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
