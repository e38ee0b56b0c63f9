"""Activations inside kernels: f and its derivative in fp32, by name (`ops/activation` has the table)."""

# Arguments of kernels have no Python types.
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def value_of(x, ACT: tl.constexpr):
    """relu2: 3 -> 9, -3 -> 0."""
    if ACT == "swiglu":
        value = x * tl.sigmoid(x)
    elif ACT == "relu2":
        value = tl.maximum(x, 0.0)
        value = value * value
    else:
        value = x * 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    return value


@triton.jit
def value_and_slope(x, ACT: tl.constexpr):
    """relu2: 3 -> (9, 6)."""
    if ACT == "swiglu":
        sigmoid = tl.sigmoid(x)
        value = x * sigmoid
        slope = sigmoid + value * (1.0 - sigmoid)
    elif ACT == "relu2":
        slope = tl.maximum(x, 0.0)
        value = slope * slope
        slope = slope + slope
    else:
        share = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        value = x * share
        slope = share + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    return value, slope
