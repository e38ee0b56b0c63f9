"""Blocks of 8-bit moments, cut from logical matrices: the same ones in every layout (`ops/eight_bits`).

A block is some neighbours of one row. Rows and whole experts are never cut, shards are cut between blocks
(`train/optim/buckets`), and so are experts that several ranks own (`balance/ownership`). What remains are
columns that tensor-parallel ranks share: where these do not end between blocks, it is said before a run
begins; with all that is said of a configuration, before torch is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from moeclipse.core.errors import ConfigError
from moeclipse.core.shares import even_bounds
from moeclipse.model.config import ModelConfig
from moeclipse.moe.config import MoEConfig

if TYPE_CHECKING:
    from torch import nn

LARGEST_BLOCK = 256
SMALLEST_BLOCK = 16


def block_of(columns: int) -> int:
    """Elements of a block of a matrix with rows of this length; 0: its moments are kept wide.

    The largest power of two that cuts rows evenly. Rows that are no multiple of 16 would pay more for tops
    than they save.
    """
    block = min(columns & -columns, LARGEST_BLOCK)
    return block if block >= SMALLEST_BLOCK else 0


def block_for(parameter: nn.Parameter, dim: int) -> int:
    """Elements of its blocks, by its logical rows; vectors have none. `dim`: of the logical tensor."""
    if dim < 2:
        return 0
    from moeclipse.tensor.cut import cut_of

    cut = cut_of(parameter)
    columns = parameter.shape[-1] if cut is None else cut.shape[-1]
    block = block_of(columns)
    if block and cut is not None and cut.columns is not None and any(edge % block for edge in cut.columns):
        raise ConfigError([advice(f"a matrix with rows of {columns}", block, cut.columns)])
    return block


def advice(what: str, block: int, columns: tuple[int, int]) -> str:
    return (
        f"optim.state = '8bit' needs rows that are cut between blocks: {what} has blocks of {block}, and "
        f"parallel.tp gives columns {columns[0]} to {columns[1]} to a rank; lower parallel.tp, or set "
        "optim.state = 'bf16'"
    )


def block_problems(model: ModelConfig, moe: MoEConfig, tp: int) -> Iterator[str]:
    """Columns that tp ranks share must end between blocks."""
    if model.attention == "gqa":
        heads, width = model.num_kv_heads, model.num_heads // model.num_kv_heads * model.head_dim
    else:
        heads, width = model.num_heads, model.v_head_dim
    shared = {}
    if "attention" in model.held_mixers:
        shared["attention (model.num_heads, model.head_dim)"] = (heads, width)
    if model.held_mixers & {"gated_delta", "kimi_delta"}:
        heads = model.delta_key_heads
        own = model.delta_value_heads // heads * model.delta_value_dim
        widths = {"gated_delta": own, "kimi_delta": model.delta_key_dim}
        for kind in model.held_mixers & widths.keys():
            shared[f"{kind} (model.delta_key_heads)"] = (heads, widths[kind])
    if "short_conv" in model.held_mixers:
        shared[f"short_conv (model.d_model, {model.d_model})"] = (model.d_model, 1)
    if model.num_expert_layers < model.num_layers:
        shared[f"model.d_ff ({model.d_ff})"] = (model.d_ff, 1)
    if moe.expert_tp == "sharded" and model.num_expert_layers:
        shared[f"moe.d_ff ({moe.d_ff})"] = (moe.d_ff, 1)
    for what, (units, width) in shared.items():
        block = block_of(units * width)
        bounds = [bound * width for bound in even_bounds(units, tp)]
        wrong = next((pair for pair in pairwise(bounds) if block and pair[1] % block), None)
        if wrong is not None:
            yield advice(what, block, wrong)
