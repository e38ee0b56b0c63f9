"""Bytes of a step: what forward keeps for backward, and what memory is left for a rank.

What is kept is read off the nodes of autograd's graph. Every tensor that a node saved counts once, with all
of its memory. Nothing is touched: hooks on saved tensors would count, too, but hand backward other tensor
objects than the parameters it adds gradients to.

Hazard. What other programs take later is not foreseen.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.autograd.graph import Node

from moeclipse.comm.mesh import Mesh
from moeclipse.core.host_memory import available_memory, whole_memory
from moeclipse.moe.losses import MoEReport

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def kept_behind(found: object, known: set[int]) -> int:
    """Bytes behind what a module gave; memory at the addresses in `known` is somebody else's."""
    new = saved_behind(roots_of(found), set())
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in new}
    return sum(size for address, size in sizes.items() if address not in known)


def roots_of(found: object) -> list[Node | None]:
    """The nodes of all tensors in what a module took or gave."""
    if isinstance(found, torch.Tensor):
        return [found.grad_fn]
    if isinstance(found, MoEReport):
        return [found.aux_loss.grad_fn]
    if isinstance(found, tuple | list):
        return [node for each in found for node in roots_of(each)]
    values = vars(found).values() if hasattr(found, "__dataclass_fields__") else ()
    return [node for each in values if isinstance(each, torch.Tensor) for node in roots_of(each)]


def saved_behind(nodes: list[Node | None], seen: set[Node]) -> Iterator[torch.Tensor]:
    """All that the nodes behind these saved, without those that were seen before; they are from now on."""
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [before for before, _ in node.next_functions]
        saved = list(getattr(node, "saved_tensors", ()))
        for name in dir(node):
            if name.startswith("_saved_"):
                value = getattr(node, name)
                saved += value if isinstance(value, list | tuple) else [value]
        yield from (each for each in saved if isinstance(each, torch.Tensor))


def readable(size: float) -> str:
    for unit in UNITS[:-1]:
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} {UNITS[-1]}"


def room_on(device: torch.device) -> float:
    """Bytes for this process: what is free, and what its allocator has."""
    free, _ = torch.cuda.mem_get_info(device)
    return float(free + torch.cuda.memory_reserved(device))


def memory_left(mesh: Mesh) -> float:
    """Bytes for this rank, before its model is there: what is free, shared with others of its host."""
    if mesh.device.type == "cpu":
        return available_memory() / mesh.ranks_here
    return room_on(mesh.device) / -(-mesh.ranks_here // max(torch.cuda.device_count(), 1))


def memory_given(mesh: Mesh) -> float:
    """Bytes of this rank's part of a host, whoever uses it now: the same in every run. Devices: not known."""
    return whole_memory() / mesh.ranks_here if mesh.device.type == "cpu" else 0.0
