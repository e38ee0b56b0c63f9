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


@triton.jit
def clamped(g, u):
    """clamped_swiglu's sigmoid(1.702 g), g = min(gate, 7) and u + 1; what is no number stays none."""
    g = tl.where(g > 7.0, 7.0, g)
    u = tl.where(u > 7.0, 7.0, tl.where(u < -7.0, -7.0, u))
    return tl.sigmoid(1.702 * g), g, u + 1.0


@triton.jit
def gated_value(g, u, ACT: tl.constexpr):
    """a = f(g) u. clamped_swiglu: (7, 7) and (9, 9) give the same."""
    if ACT == "clamped_swiglu":
        sigmoid, g, u = clamped(g, u)
        value = g * sigmoid * u
    else:
        value = value_of(g, ACT) * u
    return value


@triton.jit
def gated_slopes(g, u, ACT: tl.constexpr):
    """(a, da/dg, da/du); beyond its limits clamped_swiglu has no slope."""
    if ACT == "clamped_swiglu":
        sigmoid, kept, more = clamped(g, u)
        to_u = kept * sigmoid
        value = to_u * more
        to_g = tl.where(g <= 7.0, more * (sigmoid + 1.702 * to_u * (1.0 - sigmoid)), 0.0)
        to_u = tl.where(tl.abs(u) <= 7.0, to_u, 0.0)
    else:
        to_u, to_g = value_and_slope(g, ACT)
        value, to_g = to_u * u, to_g * u
    return value, to_g, to_u
