"""A second look at a step whose loss or gradient was not finite: where it began, and whether it comes again.

The step is computed once more, with the same weights and the same tokens, while every module's output is
looked at. What is found is put in the order in which values are made: weights, then outputs of modules in the
order in which they ran, then gradients. The rank and the tensor that come first are named.

    repeatable   the numbers themselves lead there: a lower learning rate, an earlier checkpoint, other data
    transient    the second time all was finite: the machine is to be doubted, not the model; the step is
                 computed anew, so that the run goes on as if nothing had been

Contract. Collective; leaves the model as it was, except for gradients, which a skipped step does not use.

Hazard. It costs a step with a wait for the device after every module, so it is done for the first bad step in
a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from moeclipse.comm.mesh import Mesh
from moeclipse.train.optim.buckets import Buckets

PLACES = ("weight", "output", "gradient")


class Accident(Exception):
    """A step went wrong that goes right when it is computed again."""


def look_again(
    model: nn.Module, buckets: Buckets, mesh: Mesh, compute: Callable[[], object], losses: list[float]
) -> tuple[bool, str]:
    """(transient, what is to be said) of a bad step; `compute` does it again, `losses` are the ranks'."""
    mine: list[Any] = [[PLACES.index("weight"), 0, name] for name in bad_weights(model)]
    with outputs_watched(model) as bad_outputs:
        compute()
    mine += [[PLACES.index("output"), number, name] for number, name in bad_outputs]
    mine += [[PLACES.index("gradient"), 0, name] for name in bad_gradients(buckets)]
    everyone = mesh.gather_objects(mine[:1])
    found = sorted(
        (place, number, rank, name) for rank, one in enumerate(everyone) for place, number, name in one
    )
    if not found:
        ranks = [rank for rank, loss in enumerate(losses) if not math.isfinite(loss)]
        who = " and ".join(f"rank {rank}" for rank in ranks) or "a gradient on some rank"
        return True, (
            f"transient: {who} had a non-finite value, but the same step computed again was finite "
            "everywhere; look at the memory and the links of that machine before the numbers of the model"
        )
    place, _, rank, name = found[0]
    what = f"the {PLACES[place]} of {name}" if place else f"the weight {name}"
    return False, (
        f"repeatable: {what} on rank {rank} is the first non-finite value, and it comes again when the step "
        f"is computed again; {ADVICE[PLACES[place]]}"
    )


ADVICE = {
    "weight": "resume from an earlier checkpoint, with integrity.every = 1 to see who changes it",
    "output": "lower optim.lr or resume from an earlier checkpoint; look at the tokens of this step, too",
    "gradient": "lower optim.lr, or lower optim.clip_norm; resume from an earlier checkpoint if it stays",
}


def is_bad(value: torch.Tensor) -> bool:
    return value.is_floating_point() and not bool(torch.isfinite(value).all())


def bad_weights(model: nn.Module) -> Iterator[str]:
    named = (*model.named_parameters(), *model.named_buffers())
    return (name for name, value in named if is_bad(value.detach()))


def bad_gradients(buckets: Buckets) -> Iterator[str]:
    """Of the summed gradients in this rank's shards; takes all of them, so that nothing is left in flight."""
    shards = [(bucket, bucket.reduced()) for bucket in buckets]
    for bucket, shard in shards:
        for segment in bucket.segments(everything=True):
            if is_bad(shard[segment.offset : segment.offset + segment.length]):
                yield segment.entry.name


@contextmanager
def outputs_watched(model: nn.Module) -> Iterator[list[tuple[int, str]]]:
    """(number of the call, module) of the first output that is not finite, innermost first."""
    found: list[tuple[int, str]] = []
    calls = 0

    def watch(name: str) -> Callable[[nn.Module, object, object], None]:
        def look(module: nn.Module, _args: object, out: object) -> None:
            nonlocal calls
            calls += 1
            if not found and any(is_bad(tensor.detach()) for tensor in tensors_in(out)):
                found.append((calls, name or type(module).__name__))

        return look

    handles = [module.register_forward_hook(watch(name)) for name, module in model.named_modules()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Tensors in whatever a module returns."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif hasattr(value, "__dict__"):
        yield from tensors_in(list(vars(value).values()))
