"""How tensors of any shape become flat ones and back, and which of them need no such step."""

from __future__ import annotations

import torch

from moeclipse.core.errors import ConfigError


def same_kind(x: torch.Tensor, out: torch.Tensor | None) -> None:
    if out is None or (out.shape == x.shape and out.dtype == x.dtype and out.device == x.device):
        return
    raise ConfigError(
        f"out is {out.dtype} {tuple(out.shape)} on {out.device}, "
        f"expected {x.dtype} {tuple(x.shape)} on {x.device} as the input"
    )


def flat_of(out: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    """Where the flat result is written: straight into `out` where that is contiguous, as kernels need it."""
    if out is not None and out.is_contiguous():
        return out.detach().view(-1)
    return x.new_empty(x.numel())


def shaped(flat: torch.Tensor, out: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    if out is None:
        return flat.view(x.shape)
    if flat.data_ptr() != out.data_ptr():
        out.detach().copy_(flat.view(x.shape))
    return out


def is_plain(x: torch.Tensor, out: torch.Tensor | None) -> bool:
    """Whether both lie in the memory of the host as they are: dense, contiguous, apart from each other (or
    the same) and without a gradient."""
    if not x.is_cpu or x.requires_grad or x.layout is not torch.strided or not x.is_contiguous():
        return False
    return out is None or (
        out.dtype is x.dtype and out.shape == x.shape and out.is_cpu and not out.requires_grad
        and out.is_contiguous() and not 0 < abs(out.data_ptr() - x.data_ptr()) < x.nbytes
    )  # fmt: skip
