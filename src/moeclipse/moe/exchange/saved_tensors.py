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
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import repeat
from typing import Any, TypeVar

import torch
from torch.autograd.function import FunctionCtx

Tree = TypeVar("Tree")
ITEMS, LEAF = ("*",), ("",)


class Context(FunctionCtx):
    """What torch gives a node of autograd; each node declares in its own what it keeps besides."""

    saved_tensors: tuple[torch.Tensor, ...]
    needs_input_grad: tuple[bool, ...]


class Place(int):
    """Where a tensor was: its number among those that were taken out."""


def take_apart(state: Tree, whole: tuple[type, ...] = ()) -> tuple[Tree, list[torch.Tensor]]:
    """(the tree without its tensors, which type checkers take for the tree; the tensors).

    Objects of the types `whole` are left as they are.
    """
    tensors: list[torch.Tensor] = []
    places: dict[int, Place] = {}

    def take(tensor: torch.Tensor) -> Place:
        place = places.setdefault(id(tensor), Place(len(tensors)))
        if place == len(tensors):
            tensors.append(tensor)
        return place

    return _map(state, take, whole), tensors


def put_together(
    skeleton: Tree | None, tensors: Sequence[torch.Tensor], whole: tuple[type, ...] = ()
) -> Tree:
    """The inverse of `take_apart`; of None never: torch has raised already, with `saved_tensors`."""
    assert skeleton is not None
    return _map(skeleton, tensors.__getitem__, whole)


def _map(state: Tree, leaf: Callable[..., object], whole: tuple[type, ...]) -> Tree:
    """The tree with what `leaf` makes of its leaves. Called for what has parts alone: a step has hundreds of
    values."""
    tree: Any = state
    kind: Any = type(tree)
    parts = _parts_of(kind, whole)
    if parts is None or parts is LEAF:
        mapped: Tree = tree if parts is None else leaf(tree)  # type: ignore[assignment]
        return mapped
    inside: Iterable[tuple[Any, object]]
    if parts is not ITEMS:
        inside = zip(parts, map(getattr, repeat(tree), parts), strict=True)
    else:
        inside = tree.items() if isinstance(tree, dict) else enumerate(tree)
    changed: dict[Any, object] = {}
    for key, item in inside:
        kind = type(item)
        inner = _parts_of(kind, whole)
        if inner is not None:
            changed[key] = leaf(item) if inner is LEAF else _map(item, leaf, whole)
    if parts is not ITEMS:
        whole_one: Any = state
        tree = dataclasses.replace(whole_one, **changed) if changed else tree
    elif isinstance(tree, dict):
        tree = {**tree, **changed}
    else:
        items = list(tree)
        for place, item in changed.items():
            items[place] = item
        tree = tuple(items) if isinstance(tree, tuple) else items
    result: Tree = tree
    return result


@cache
def _parts_of(kind: type, whole: tuple[type, ...]) -> tuple[str, ...] | None:
    """Names of the fields of a dataclass, ITEMS, LEAF; None: there is nothing in it."""
    if issubclass(kind, dict) or kind in (list, tuple):
        return ITEMS
    if issubclass(kind, torch.Tensor | Place):
        return LEAF
    if not dataclasses.is_dataclass(kind) or issubclass(kind, whole):
        return None
    return tuple(field.name for field in dataclasses.fields(kind))


def without_rows(tensor: torch.Tensor) -> torch.Tensor:
    """An empty tensor of this type and width; a slice would keep the rows."""
    return tensor.detach().new_empty(0, *tensor.shape[1:])
