"""Names of the tensors of mixers other than attention.

split    a matrix for queries, keys and values, one each for gate, write and decay (Qwen3.5)
fused    two: of each head of keys its query, key, values and gates; its writes and decays (Qwen3-Next)
kimi     a matrix and a convolution for each, narrow ones before gate and decay (Kimi-Linear)
"""

from __future__ import annotations

from typing import Literal

from moeclipse.hf.row_ranges import LogicalTensor, Named, RowRange, taking_turns, whole
from moeclipse.model.config import Mixer, ModelConfig

MixerStyle = Literal["split", "fused", "kimi"]


def mixer_tensors(kind: Mixer, style: MixerStyle, ours: str, layer: str, model: ModelConfig) -> Named:
    if kind == "short_conv":
        yield from conv_mixer(ours, f"{layer}conv.", model)
    elif kind == "kimi_delta":
        yield from kimi_delta(ours, f"{layer}self_attn.", model)
    else:
        yield from gated_delta(ours, f"{layer}linear_attn.", style, model)


def rows_of(key: str, shape: tuple[int, ...], first: int, rows: int) -> LogicalTensor:
    """Neighbours of a matrix."""
    part = RowRange(key=key, shape=shape, rows=rows, first=first)
    return LogicalTensor(shape=(rows, *shape[1:]), parts=(part,))


def conv(key: str, channels: int, width: int, first: int = 0, rows: int = 0) -> LogicalTensor:
    """Of some channels of a convolution: [channels, 1, width]."""
    rows = rows or channels
    part = RowRange(key=key, shape=(channels, 1, width), rows=rows, first=first, around=(0, 1))
    return LogicalTensor(shape=(rows, width), parts=(part,))


def conv_mixer(ours: str, theirs: str, model: ModelConfig) -> Named:
    d = model.d_model
    yield f"{ours}inputs.weight", whole(f"{theirs}in_proj.weight", 3 * d, d)
    yield f"{ours}conv.weight", conv(f"{theirs}conv.weight", d, model.conv_width)
    yield f"{ours}out.weight", whole(f"{theirs}out_proj.weight", d, d)


def gated_delta(ours: str, theirs: str, style: MixerStyle, model: ModelConfig) -> Named:
    G, H, d = model.delta_key_heads, model.delta_value_heads, model.d_model
    K, V = model.delta_key_dim, H // G * model.delta_value_dim  # of all values of a head of keys
    firsts = {"query": (0, G * K), "key": (G * K, G * K), "value": (2 * G * K, G * V)}
    channels = G * (2 * K + V)
    if style == "fused":
        stride, shape = 2 * K + 2 * V, (G * (2 * K + 2 * V), d)
        parts = {"query": (0, K), "key": (K, K), "value": (2 * K, V), "gate": (2 * K + V, V)}
        for name, (first, rows) in parts.items():
            key = f"{theirs}in_proj_qkvz.weight"
            yield f"{ours}{name}.weight", taking_turns(key, shape, first, rows, stride, G)
        for number, name in enumerate(("write", "decay")):
            given = (number * (H // G), H // G, 2 * (H // G), G)
            yield f"{ours}{name}.weight", taking_turns(f"{theirs}in_proj_ba.weight", (2 * H, d), *given)
    else:
        for name, (first, rows) in firsts.items():
            key = f"{theirs}in_proj_qkv.weight"
            yield f"{ours}{name}.weight", rows_of(key, (channels, d), first, rows)
        for name, letter, rows in (("gate", "z", G * V), ("write", "b", H), ("decay", "a", H)):
            yield f"{ours}{name}.weight", whole(f"{theirs}in_proj_{letter}.weight", rows, d)
    for name, (first, rows) in firsts.items():
        given = (channels, model.conv_width, first, rows)
        yield f"{ours}conv_{name}.weight", conv(f"{theirs}conv1d.weight", *given)
    yield f"{ours}rate", whole(f"{theirs}A_log", H)
    yield f"{ours}shift", whole(f"{theirs}dt_bias", H)
    yield f"{ours}norm.weight", whole(f"{theirs}norm.weight", model.delta_value_dim)
    yield f"{ours}out.weight", whole(f"{theirs}out_proj.weight", d, G * V)


def kimi_delta(ours: str, theirs: str, model: ModelConfig) -> Named:
    H, K, d = model.delta_key_heads, model.delta_key_dim, model.d_model
    for name in ("query", "key", "value"):
        yield f"{ours}{name}.weight", whole(f"{theirs}{name[0]}_proj.weight", H * K, d)
        yield f"{ours}conv_{name}.weight", conv(f"{theirs}{name[0]}_conv1d.weight", H * K, model.conv_width)
    yield f"{ours}write.weight", whole(f"{theirs}b_proj.weight", H, d)
    for name, letter in (("gate", "g"), ("decay", "f")):
        yield f"{ours}{name}_down.weight", whole(f"{theirs}{letter}_a_proj.weight", K, d)
        yield f"{ours}{name}.weight", whole(f"{theirs}{letter}_b_proj.weight", H * K, K)
    rate = RowRange(key=f"{theirs}A_log", shape=(1, 1, H, 1), rows=H, around=(2, 1))
    yield f"{ours}rate", LogicalTensor(shape=(H,), parts=(rate,))
    yield f"{ours}shift", whole(f"{theirs}dt_bias", H * K)
    yield f"{ours}norm.weight", whole(f"{theirs}o_norm.weight", K)
    yield f"{ours}out.weight", whole(f"{theirs}o_proj.weight", d, H * K)
