"""A cluster as data: devices in nodes, a near link inside of each, a far link between them.

Which pairs of an axis are near follows from its stride: ranks are numbered node by node, so the ranks of an
axis whose members lie `stride` apart leave the node after gpus_per_node / stride of them.

    exchange      a token goes once to each rank that holds an expert of its choice; with the two-level wire
                  it crosses to each node once, and fans out there over the near link
    collective    each rank takes in what the others hold; a node takes each byte in once

Far and near transfers run at once, so the slower of them counts. How many ranks and nodes a token visits is
an expectation over even routing, exact for gates that choose among the experts of some groups only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import comb
from typing import Any

from moeclipse.core.errors import ConfigError
from moeclipse.core.toml import read_toml
from moeclipse.cost.hardware import Device, Link, device, link
from moeclipse.cost.kernels import MEASURED_ON_HOPPER, ON_CPU, KernelConstants

TABLE_KEYS = (
    *("device", "gpus_per_node", "near", "far", "host", "host_memory", "comm_processors"),
    *("measured", "kernels"),
)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    device: Device
    gpus_per_node: int
    near: Link
    far: Link
    """One port for each device."""
    host: Link
    comm_processors: int = 20
    """Processors that an exchange takes from the products beside it (20 of 132: DeepSeek-V3, on H800)."""
    constants: KernelConstants = MEASURED_ON_HOPPER
    host_memory: float = 240e9
    """Bytes that the state of one device may take; assumed: of 2 TB beside eight."""

    def __post_init__(self) -> None:
        if self.gpus_per_node < 1:
            raise ConfigError(f"gpus_per_node ({self.gpus_per_node}) must be at least 1")
        if not 0 <= self.comm_processors < self.device.processors:
            raise ConfigError(
                f"comm_processors ({self.comm_processors}) must leave some of the device's "
                f"{self.device.processors} processors"
            )

    @property
    def rate_beside_exchange(self) -> float:
        """Of products, while rows travel."""
        return 1 - self.comm_processors / self.device.processors

    def nodes(self, size: int, stride: int = 1) -> int:
        """That `size` ranks, `stride` apart and the first at the start of a node, lie on."""
        return len({rank * stride // self.gpus_per_node for rank in range(size)})

    def link_of(self, stride: int) -> Link:
        """Between neighbours of an axis, where all of them may send at once."""
        return self.near if stride < self.gpus_per_node else self.far

    def collective(self, num_bytes: float, size: int, stride: int = 1) -> float:
        """Seconds of a gather that leaves `num_bytes` on every rank, or of the scatter that sums as many."""
        if size == 1:
            return 0.0
        nodes = self.nodes(size, stride)
        inside = size / nodes
        near = self._seconds(self.near, num_bytes * (inside - 1) / inside, inside)
        far = self._seconds(self.far, num_bytes * (nodes - 1) / nodes / inside, nodes)
        return max(near, far)

    def exchange(
        self, tokens: float, row_bytes: float, experts: ExpertChoice, size: int, *, two_level: bool = True
    ) -> float:
        """Seconds of one dispatch or combine: `tokens` of each of `size` ranks that share the experts."""
        if size == 1:
            return 0.0
        near, far = self.exchange_rows(experts, size, two_level=two_level)
        nodes = self.nodes(size)
        return max(
            self._seconds(self.near, tokens * near * row_bytes, size / nodes),
            self._seconds(self.far, tokens * far * row_bytes, nodes),
        )

    def exchange_rows(self, experts: ExpertChoice, size: int, *, two_level: bool) -> tuple[float, float]:
        """Of one token, (over near links, over far ones), each way."""
        nodes = self.nodes(size)
        inside = size / nodes
        ranks = experts.visited(size)
        if not two_level or inside == 1:
            return ranks * (inside - 1) / size, ranks * (size - inside) / size
        return ranks * (inside - 1) / inside, experts.visited(nodes) * (nodes - 1) / nodes

    @staticmethod
    def _seconds(over: Link, num_bytes: float, members: float) -> float:
        return over.seconds(num_bytes, math.ceil(math.log2(members))) if members > 1 else 0.0


@dataclass(frozen=True, kw_only=True)
class ExpertChoice:
    """Which experts a token chooses, as far as a wire has to know."""

    num_experts: int
    top_k: int
    num_groups: int = 1
    top_groups: int = 1

    def visited(self, parts: int) -> float:
        """Of `parts` equal parts of the experts, how many hold one of a token's choice, on average.

        Parts that cut across groups count as if any experts could be chosen.
        """
        held = self.num_experts / parts
        size = self.num_experts / self.num_groups
        if held < 1:
            return float(self.top_k)
        groups, top = self.num_groups, self.top_groups
        if groups == 1 or max(held, size) % min(held, size):
            return parts * self._met(held, self.num_experts)
        open_experts = size * top
        mine = max(round(held / size), 1)  # groups of a part, or one that it is a piece of
        ways = comb(groups, top)
        met = 0.0
        for chosen in range(min(mine, top) + 1):
            odds = comb(mine, chosen) * comb(groups - mine, top - chosen) / ways
            met += odds * self._met(chosen * min(held, size), open_experts)
        return parts * met

    def _met(self, held: float, open_experts: float) -> float:
        """Odds that one of `held` experts is among a token's choice of all that are open to it."""
        missed = 1.0
        for chosen in range(self.top_k):
            missed *= max(open_experts - held - chosen, 0.0) / (open_experts - chosen)
        return 1 - missed


def _cluster(name: str, near: str, far: str, gpus_per_node: int = 8, processors: int = 20) -> Cluster:
    return Cluster(
        device=device(name),
        gpus_per_node=gpus_per_node,
        near=link(near),
        far=link(far),
        host=link("host-copies"),
        comm_processors=processors,
    )


CLUSTERS: dict[str, Cluster] = {
    "a100": _cluster("a100", "nvlink3", "hdr"),
    "h100": _cluster("h100", "nvlink4", "infiniband"),
    "h800": _cluster("h800", "nvlink-h800", "infiniband"),
    "h200": _cluster("h200", "nvlink4", "infiniband"),
    "b200": _cluster("b200", "nvlink5", "infiniband"),
    "gb200": _cluster("gb200", "nvlink5", "infiniband", 72),
    "mi300x": _cluster("mi300x", "infinity-fabric", "infiniband", processors=32),
    "cpu": replace(_cluster("cpu", "loopback", "loopback", 2, 0), constants=ON_CPU, host_memory=0.0),
}
"""By the name of their device, as they are usually sold: eight in a node, or the 72 of an NVL72."""


def cluster(name: str) -> Cluster:
    if name not in CLUSTERS:
        device(name)  # which says what there is
    return CLUSTERS[name]


def cluster_at(source: str) -> Cluster:
    """By the name of its device, or from a TOML file."""
    if source.endswith(".toml"):
        return cluster_from(read_toml(source), source)
    try:
        return cluster(source)
    except ConfigError as error:
        raise ConfigError(f"{error}, or give a TOML file, which moeclipse measure -o FILE writes") from None


def cluster_from(data: Mapping[str, Any], source: str) -> Cluster:
    """From a table: `device` names one, everything else replaces what that has.

    device = "h100"
    gpus_per_node = 4
    far = { bandwidth = 25e9, latency = 5e-6, efficiency = 0.9 }
    host_memory = 100e9           # that optimizer state of one device may take
    [measured]                    # of the device itself
    efficiency = 0.71
    [kernels]                     # what kernels reach (`cost/kernels.KernelConstants`)
    grouped = 0.8
    """
    unknown = [key for key in data if key not in TABLE_KEYS]
    if unknown:
        raise ConfigError(f"{source}: unknown key {unknown[0]!r}; a cluster has {', '.join(TABLE_KEYS)}")
    if not isinstance(data.get("device"), str):
        raise ConfigError(f"{source} needs a device: one of {', '.join(CLUSTERS)}")
    known = cluster(data["device"])
    changes: dict[str, Any] = {}
    for key in ("gpus_per_node", "comm_processors"):
        if key in data:
            changes[key] = _whole(data[key], f"{source}: {key}")
    if "host_memory" in data:
        size = data["host_memory"]
        if isinstance(size, bool) or not isinstance(size, int | float) or not 0 <= size < math.inf:
            raise ConfigError(f"{source}: host_memory ({size!r}) must be a number of bytes, 0 or more")
        changes["host_memory"] = float(size)
    for key in ("near", "far", "host"):
        if isinstance(data.get(key), str):
            changes[key] = link(data[key])
        elif key in data:
            found = _replaced(getattr(known, key), data[key], f"{source}: {key}")
            changes[key] = replace(found, source=f"{source}; the rest: {getattr(known, key).source}")
    if "kernels" in data:
        changes["constants"] = _replaced(known.constants, data["kernels"], f"{source}: kernels")
    if "measured" in data:
        found = _replaced(known.device, data["measured"], f"{source}: measured")
        changes["device"] = replace(found, source=f"{source}; the rest: {known.device.source}")
    return replace(known, **changes)


def _replaced(known: Any, table: Any, what: str) -> Any:
    numbers = [f.name for f in fields(known) if f.name not in ("name", "dtype", "source")]
    if not isinstance(table, Mapping):
        raise ConfigError(f"{what} ({table!r}) must be the name of a link, or a table of numbers")
    for key, value in table.items():
        if key not in numbers:
            raise ConfigError(f"{what}: unknown key {key!r}; choose from {', '.join(numbers)}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ConfigError(f"{what}.{key} ({value!r}) must be a positive number")
    return replace(known, **table)


def _whole(value: Any, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{what} ({value!r}) must be a whole number")
    return value
