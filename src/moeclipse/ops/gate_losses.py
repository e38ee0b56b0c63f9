"""A gate's losses from its sums: aux = balance * sum_e load_e prob_e + z * squares, one kernel each way.

Contract. Loads are whole numbers without a gradient, `prob_E` and `squares` have one. In plain torch this is
a dozen launches for one number.
"""

from __future__ import annotations

from typing import Any

import torch

from moeclipse.ops.first_order import first_order

MOST_EXPERTS = 4096


def gate_losses_reference(
    load_E: torch.Tensor, prob_E: torch.Tensor, squares: torch.Tensor, balance: float, z: float
) -> torch.Tensor:
    aux = balance * torch.dot(load_E.to(prob_E.dtype), prob_E)
    return aux + z * squares if z else aux


def gate_losses(
    load_E: torch.Tensor, prob_E: torch.Tensor, squares: torch.Tensor, balance: float, z: float
) -> torch.Tensor:
    """`balance` and `z` are factors of the whole sums."""
    fits = prob_E.is_cuda and prob_E.dtype == torch.float32 and 0 < len(prob_E) <= MOST_EXPERTS
    if not fits or torch.compiler.is_compiling():
        return gate_losses_reference(load_E, prob_E, squares, balance, z)
    aux: torch.Tensor = _GateLosses.apply(load_E, prob_E, squares, balance, z)
    return aux


class _GateLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, load_E: torch.Tensor, prob_E: torch.Tensor, squares: torch.Tensor, balance: float, z: float
    ) -> torch.Tensor:
        ctx.save_for_backward(load_E)
        ctx.factors = balance, z
        return gate_losses_kernel(load_E, prob_E, squares, balance, z)

    @staticmethod
    @first_order
    def backward(ctx: Any, d_aux: torch.Tensor) -> tuple[Any, ...]:
        (load_E,), (balance, z) = ctx.saved_tensors, ctx.factors
        d_prob_E, d_squares = gate_losses_backward_kernel(load_E, d_aux, balance, z)
        return None, d_prob_E, d_squares if z else None, None, None


def gate_losses_kernel(
    load_E: torch.Tensor, prob_E: torch.Tensor, squares: torch.Tensor, balance: float, z: float
) -> torch.Tensor:
    from moeclipse.ops.triton import gate_losses as kernels

    E, aux = len(prob_E), prob_E.new_empty(())
    kernels.losses[(1,)](
        load_E, prob_E, squares, aux, E, balance, z, HAS_SQUARES=z != 0, E_PADDED=_power_of_two(E)
    )
    return aux


def gate_losses_backward_kernel(
    load_E: torch.Tensor, d_aux: torch.Tensor, balance: float, z: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(d_prob_E, d_squares)."""
    from moeclipse.ops.triton import gate_losses as kernels

    E = len(load_E)
    d_prob_E, d_squares = d_aux.new_empty(E), d_aux.new_empty(())
    kernels.losses_backward[(1,)](
        load_E, d_aux, d_prob_E, d_squares, E, balance, z, E_PADDED=_power_of_two(E)
    )
    return d_prob_E, d_squares


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
