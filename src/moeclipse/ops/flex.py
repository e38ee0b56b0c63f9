"""Flex attention, compiled: without its compiler it would hold all scores.

    the first SHAPES shapes of a family      each compiled for itself
    all others of the family                 once, for shapes of any size

A family is what makes another kernel in any case: mask, softcap, heads, widths, types, who wants gradients. A
kernel for one shape takes 0.55 to 0.8 of the time of one for any (docs/measured.md), and seconds to compile:
a run that trains has two or three shapes, and a loop over samples of any length has as many as samples.

Each shape is a function of its own to dynamo, which stops compiling one after eight variants, tells a log,
and from there on runs it uncompiled: a hundred times as slow, with all scores in memory.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

SHAPES = 4


def flex(
    q_BHSd: torch.Tensor,
    k_BGLd: torch.Tensor,
    v_BGLe: torch.Tensor,
    *,
    mask: BlockMask,
    kind: tuple[Hashable, ...],
    softcap: float = 0.0,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, H, S, e], and the logarithm of each sum of exponentials, [B, H, S]; `kind`: which mask it is."""
    rows = (q_BHSd, k_BGLd, v_BGLe)
    modes = (torch.is_grad_enabled(), torch.is_autocast_enabled("cuda"))
    sizes = ((t.shape[1], t.shape[3], t.dtype, t.device, t.requires_grad) for t in rows)
    family = (kind, softcap, scale, *modes, *sizes)
    run = known().runner(family, tuple((tensor.shape, tensor.stride()) for tensor in rows))
    found: tuple[torch.Tensor, torch.Tensor] = run(
        *rows,
        score_mod=capped_at(softcap) if softcap else None,
        block_mask=mask,
        scale=scale,
        enable_gqa=q_BHSd.shape[1] != k_BGLd.shape[1],
        return_lse=True,
    )
    return found


@functools.cache
def capped_at(softcap: float) -> Callable[..., Any]:
    def capped(score: Any, _b: Any, _h: Any, _i: Any, _j: Any) -> Any:
        return softcap * torch.tanh(score / softcap)

    return capped


class FlexKernels:
    """What has been compiled, by family and shape."""

    def __init__(self, make: Callable[[str, bool], Callable[..., Any]]) -> None:
        self._make = make
        """With a name, for one shape or for any."""
        self._made = 0
        self._shapes: dict[Hashable, dict[Hashable, Callable[..., Any]]] = {}
        self._any: dict[Hashable, Callable[..., Any]] = {}

    def runner(self, family: Hashable, shape: Hashable) -> Callable[..., Any]:
        shapes = self._shapes.setdefault(family, {})
        if shape not in shapes and len(shapes) < SHAPES:
            shapes[shape] = self._new(True)
        if shape in shapes:
            return shapes[shape]
        if family not in self._any:
            self._any[family] = self._new(False)
        return self._any[family]

    def _new(self, one_shape: bool) -> Callable[..., Any]:
        self._made += 1
        return self._make(f"flex_{self._made}", one_shape)


def plain(*args: Any, **options: Any) -> Any:
    return flex_attention(*args, **options)


def compiled(name: str, one_shape: bool) -> Callable[..., Any]:
    """A function with a code and a name of its own, by which dynamo counts and remembers."""
    code = plain.__code__.replace(co_name=name)
    # Where no dimension is to be fixed, dynamo would make numbers variable, too, which flex does not take:
    # left to itself it begins with a shape and makes variable what changes.
    return torch.compile(types.FunctionType(code, globals()), dynamic=False if one_shape else None)


@functools.cache
def known() -> FlexKernels:
    return FlexKernels(compiled)
