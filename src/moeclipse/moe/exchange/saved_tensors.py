"""What a node of autograd keeps between forward and backward: tensors apart from everything else.

    ctx.state, tensors = take_apart(state)       the same tree, with numbers where tensors were
    ctx.save_for_backward(*tensors)
    ...
    state = put_together(ctx.state, ctx.saved_tensors)

Only tensors that go through `save_for_backward` are what torch thinks they are: activation checkpointing
frees them and fills them in again, a weight that was changed in place is found out, and a second backward
raises torch's own error. A tensor that hides in an attribute of the context escapes all of this.

Trees are made of dataclasses, dicts, lists and tuples; a tensor that stands in several places is kept once.
Hazard: `ctx.saved_tensors` may be read once in each backward, because reading may run forward again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

import torch
from torch.autograd.function import FunctionCtx

Tree = TypeVar("Tree")
PLAIN = (int, float, str, slice)
ITEMS, LEAF = ("*",), ("",)


class Context(FunctionCtx):
    """What torch gives a node of autograd; each node declares in its own what it keeps besides."""

    saved_tensors: tuple[torch.Tensor, ...]
    needs_input_grad: tuple[bool, ...]


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a tensor was: its number among those that were taken out."""

    number: int


def take_apart(state: Tree, whole: tuple[type, ...] = ()) -> tuple[Tree, list[torch.Tensor]]:
    """(the tree without its tensors, which type checkers take for the tree; the tensors).

    Objects of the types `whole` are left as they are.
    """
    tensors: list[torch.Tensor] = []
    places: dict[int, Place] = {}

    def leaf(value: object) -> object:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in places:
            places[id(value)] = Place(len(tensors))
            tensors.append(value)
        return places[id(value)]

    return _map(state, leaf, whole), tensors


def put_together(
    skeleton: Tree | None, tensors: Sequence[torch.Tensor], whole: tuple[type, ...] = ()
) -> Tree:
    """The inverse of `take_apart`; of None never: torch has raised already, with `saved_tensors`."""
    assert skeleton is not None
    return _map(skeleton, lambda value: tensors[value.number] if isinstance(value, Place) else value, whole)


def _map(value: Any, leaf: Callable[[object], object], whole: tuple[type, ...]) -> Any:
    kind: Any = type(value)
    names = _parts_of(kind, whole)
    if names is None:
        return value
    if names == LEAF:
        return leaf(value)
    if names == ITEMS:
        if isinstance(value, dict):
            return {key: _map(item, leaf, whole) for key, item in value.items()}
        return kind(_map(item, leaf, whole) for item in value)
    changed = {}
    for name in names:
        item = getattr(value, name)
        found = _map(item, leaf, whole)
        if found is not item:
            changed[name] = found
    return dataclasses.replace(value, **changed) if changed else value


@cache
def _parts_of(kind: type, whole: tuple[type, ...]) -> tuple[str, ...] | None:
    """Names of the fields of a dataclass, ITEMS, LEAF; None: there is nothing in it. Asked for every value of
    every tree, hundreds of times in a step."""
    if issubclass(kind, dict) or kind in (list, tuple):
        return ITEMS
    if issubclass(kind, PLAIN):
        return None
    if not dataclasses.is_dataclass(kind) or issubclass(kind, (Place, *whole)):
        return LEAF
    return tuple(field.name for field in dataclasses.fields(kind))


def without_rows(tensor: torch.Tensor) -> torch.Tensor:
    """An empty tensor of this type and width; a slice would keep the rows."""
    return tensor.detach().new_empty(0, *tensor.shape[1:])
