"""Some ranks that communicate, and the hosts that ranks are on."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch.distributed as dist

from moeclipse.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Group:
    """Some ranks that communicate; `index` is this rank's place among them."""

    name: str
    ranks: tuple[int, ...]
    index: int
    handle: dist.ProcessGroup | None = field(default=None, repr=False)
    backend: str = ""

    @cached_property
    def size(self) -> int:
        return len(self.ranks)


def number_hosts(names: Sequence[object], num_ranks: int) -> tuple[int, ...]:
    """A number for each name, by first appearance."""
    if len(names) != num_ranks:
        raise ConfigError(
            f"hosts names {len(names)} hosts, but there are {num_ranks} ranks; name one for each"
        )
    order = list(dict.fromkeys(names))
    return tuple(order.index(name) for name in names)


def host_id() -> str:
    """Names the clock: containers of one host share it, two hosts never do."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return socket.gethostname()
