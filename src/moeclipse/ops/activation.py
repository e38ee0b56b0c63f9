"""SwiGLU on a fused projection.

    h_N2F = [gate, up],  a_NF = silu(gate) * up

    backward   d_gate = d_a * up * sigmoid(gate) * (1 + gate * (1 - sigmoid(gate)))
               d_up   = d_a * silu(gate)

Only h is kept for backward: the activation is cheap to rebuild and as large as everything else.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def swiglu(h_N2F: torch.Tensor) -> torch.Tensor:
    gate, up = h_N2F.chunk(2, dim=-1)
    return F.silu(gate) * up


def swiglu_backward(d_a_NF: torch.Tensor, h_N2F: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(d_h, a): the activation falls out on the way, and the weight gradient needs it."""
    gate, up = h_N2F.chunk(2, dim=-1)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    d_h = torch.empty_like(h_N2F)
    d_gate, d_up = d_h.chunk(2, dim=-1)
    torch.mul(d_a_NF, up * (sigmoid + silu * (1 - sigmoid)), out=d_gate)
    torch.mul(d_a_NF, silu, out=d_up)
    return d_h, silu * up
