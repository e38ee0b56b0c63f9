"""A gate's two losses as one number, and its gradient; one program holds all experts."""

# Arguments of kernels have no Python types.
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def losses(
    load, prob, squares, aux, E, balance, z, HAS_SQUARES: tl.constexpr, E_PADDED: tl.constexpr
):  # fmt: skip
    """load [3, 1], prob [0.5, 0.5], balance 2, no z: aux 4."""
    expert = tl.arange(0, E_PADDED)
    count = tl.load(load + expert, mask=expert < E, other=0).to(tl.float32)
    total = balance * tl.sum(count * tl.load(prob + expert, mask=expert < E, other=0.0), axis=0)
    if HAS_SQUARES:
        total += z * tl.load(squares)
    tl.store(aux, total)


@triton.jit
def losses_backward(load, d_aux, d_prob, d_squares, E, balance, z, E_PADDED: tl.constexpr):
    expert = tl.arange(0, E_PADDED)
    given = tl.load(d_aux)
    count = tl.load(load + expert, mask=expert < E, other=0).to(tl.float32)
    tl.store(d_prob + expert, given * balance * count, mask=expert < E)
    tl.store(d_squares, given * z)
