"""Which algorithm the ranks of a group take, alike on all of them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import torch

from moeclipse.comm.failure import Watch
from moeclipse.comm.gather_json import tell_all
from moeclipse.comm.group import Group
from moeclipse.comm.reduce.table import Algorithm, algorithm_for, algorithm_from
from moeclipse.comm.shared.device import devices_of
from moeclipse.comm.shared.links import Topology, topology_here


def choose_algorithm(
    group: Group,
    watch: Watch,
    device: torch.device,
    table: Path,
    given: Algorithm | None = None,
    topology: Topology | None = None,
) -> Algorithm:
    """Collective: what rank 0 of the group takes, `given` or from the table for devices joined as theirs are.

    `topology` takes the place of what this process sees.
    """
    name, linked, one_device = "cpu", True, False
    if device.type == "cuda":
        name, devices = torch.cuda.get_device_name(device), devices_of(group, watch, device)
        one_device = len(set(devices)) < len(devices)
        linked = (topology or topology_here()).linked(devices)
    mine = given or algorithm_for(name, group.size, linked, table, shared=one_device)
    return algorithm_from(
        tell_all(group, watch, asdict(mine), f"opening of all-reduce, group {group.name}")[0]
    )
