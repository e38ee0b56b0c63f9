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
from typing import Any, cast

import torch

PLAIN = (int, float, str, slice)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a tensor was: its number among those that were taken out."""

    number: int


def take_apart(state: Any, whole: tuple[type, ...] = ()) -> tuple[Any, list[torch.Tensor]]:
    """(the tree without its tensors, the tensors). Objects of the types `whole` are left as they are."""
    tensors: list[torch.Tensor] = []
    places: dict[int, Place] = {}

    def leaf(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in places:
            places[id(value)] = Place(len(tensors))
            tensors.append(value)
        return places[id(value)]

    return _map(state, leaf, whole), tensors


def put_together(skeleton: Any, tensors: Sequence[torch.Tensor], whole: tuple[type, ...] = ()) -> Any:
    """The inverse of `take_apart`."""
    return _map(skeleton, lambda value: tensors[value.number] if isinstance(value, Place) else value, whole)


def _map(value: Any, leaf: Callable[[Any], Any], whole: tuple[type, ...]) -> Any:
    if isinstance(value, dict):
        return {key: _map(item, leaf, whole) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_map(item, leaf, whole) for item in value)
    if isinstance(value, PLAIN):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, Place, *whole)):
        found = {name: getattr(value, name) for name in _names_of(cast(Any, type(value)))}
        changed = {name: _map(item, leaf, whole) for name, item in found.items()}
        if all(changed[name] is item for name, item in found.items()):
            return value
        return dataclasses.replace(cast(Any, value), **changed)
    return leaf(value)


@cache
def _names_of(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))
