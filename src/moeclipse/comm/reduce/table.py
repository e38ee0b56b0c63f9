"""Which all-reduce is used for which size: a small table, and a file that overrides it.

An `Algorithm` is made for a device, a number of ranks and a topology. The defaults for devices are those that
proved well on NVLink machines: two stages only where all pairs are directly linked, from 512 KiB for up to
4 ranks and from 256 KiB for up to 8, and never for two ranks, where a second stage saves no byte read.
Between processes of one host every pair is linked. `bench/all_reduce.py --tune` measures the machine and
writes the file.

Hazard: ranks that chose differently would wait for each other, so all use the first rank's table.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

from moeclipse.comm.failure import Watch
from moeclipse.comm.gather_json import tell_all
from moeclipse.comm.group import Group
from moeclipse.comm.shared.device import devices_of
from moeclipse.comm.shared.links import Topology, topology_here
from moeclipse.core.errors import ConfigError
from moeclipse.core.outside import read_json

DEFAULT_FILE = Path("~/.cache/moeclipse/all_reduce.json")
KIB, MIB = 1 << 10, 1 << 20
MAX_RANKS = 8


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    two_stages_from: int | None = None
    """Bytes from which two stages are used; None: never."""
    two_stages_until: int | None = None
    """Bytes from which one stage is used again: to ranks that share a device all inputs are as near as their
    own, and the second stage is a detour. None: never."""
    copied_two_stages_from: int | None = None
    """The same for inputs that are copied to shared memory first, as they are outside of graphs unless they
    were shared (CUDA): two stages copy less of them. None: as for others."""
    chunk_bytes: int = 2 * MIB
    """Bytes that go through shared memory at a time (CPU)."""
    max_bytes: int | None = None
    """Bytes above which torch.distributed is used; None: no limit."""
    in_place_from: int | None = 512 * KIB
    """Bytes from which captured inputs and shared tensors are read where they are (CUDA); None: never."""

    def num_stages(self, num_bytes: int, copied: bool) -> int:
        start, until = self.two_stages_from, self.two_stages_until
        if copied and self.copied_two_stages_from is not None:
            start, until = self.copied_two_stages_from, None
        return 2 if start is not None and start <= num_bytes and (until is None or num_bytes < until) else 1


def default_algorithm(device: str, num_ranks: int, linked: bool, shared: bool = False) -> Algorithm:
    """`device` is "cpu" or a device's name; `linked`: every pair of ranks reads each other directly.

    `shared`: ranks run on one device.
    """
    if device == "cpu":
        if num_ranks == 2:
            return Algorithm(chunk_bytes=512 * KIB)  # two areas of both ranks stay in a cache of 2 MiB
        return Algorithm(two_stages_from=512 * KIB)
    if shared:  # as measured on an H200
        if num_ranks == 2:
            return Algorithm(in_place_from=4 * MIB, copied_two_stages_from=8 * MIB)
        there = {"in_place_from": 2 * MIB, "two_stages_from": 2 * MIB, "two_stages_until": 16 * MIB}
        return Algorithm(**there, copied_two_stages_from=4 * MIB)
    # Two ranks spend less on a copy than on the second round that reading in place needs, for long.
    in_place = 4 * MIB if num_ranks == 2 else 512 * KIB
    if not linked or num_ranks == 2:
        return Algorithm(max_bytes=8 * MIB, in_place_from=in_place)
    start = 512 * KIB if num_ranks <= 4 else 256 * KIB
    return Algorithm(two_stages_from=start, max_bytes=8 * MIB, in_place_from=in_place)


def key_of(device: str, num_ranks: int, linked: bool, shared: bool = False) -> str:
    topology = "one device" if shared else "linked" if linked else "not linked"
    return f"{device}|{num_ranks} ranks|{topology}"


def algorithm_for(
    device: str, num_ranks: int, linked: bool, file: Path = DEFAULT_FILE, *, shared: bool = False
) -> Algorithm:
    """From the file if it was tuned there, else the default."""
    found = read_table(file).get(key_of(device, num_ranks, linked, shared))
    return default_algorithm(device, num_ranks, linked, shared) if found is None else found


def read_table(file: Path = DEFAULT_FILE) -> dict[str, Algorithm]:
    path = file.expanduser()
    if not path.is_file():
        return {}
    advice = "remove it, or write it anew with bench/all_reduce.py --tune"
    try:
        data = read_json(path)
        return {key: algorithm_from(values) for key, values in data.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path} is not a table of all-reduce algorithms ({error}); {advice}") from None


def algorithm_from(values: dict[str, int | None]) -> Algorithm:
    unknown = set(values) - {field.name for field in fields(Algorithm)}
    if unknown:
        raise ValueError(f"unknown entry {sorted(unknown)[0]!r}")
    for name, value in values.items():
        if not (value is None and name != "chunk_bytes") and (type(value) is not int or value < 0):
            raise ValueError(f"{name} must be a number of bytes, not {value!r}")
    return Algorithm(**values)  # type: ignore[arg-type]


def write_algorithm(key: str, algorithm: Algorithm, file: Path = DEFAULT_FILE) -> None:
    """Add or replace one entry; readers see the old file or the new one, never half of it."""
    path = file.expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    table = read_table(path) | {key: algorithm}
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({k: asdict(v) for k, v in sorted(table.items())}, indent=2) + "\n")
    partial.replace(path)


def table_lines(device: str, linked: bool, file: Path = DEFAULT_FILE) -> list[str]:
    """For `moeclipse doctor`: what is used for 2 to 8 ranks, and where that comes from."""
    tuned, lines = read_table(file), []
    for num_ranks in (2, 4, 8):
        key = key_of(device, num_ranks, linked)
        used = algorithm_for(device, num_ranks, linked, file)
        two = "never" if used.two_stages_from is None else f"from {_size(used.two_stages_from)}"
        two += f" to {_size(used.two_stages_until)}" if used.two_stages_until else ""
        most = "any size" if used.max_bytes is None else f"up to {_size(used.max_bytes)}"
        source = "tuned" if key in tuned else "default"
        lines.append(f"{num_ranks} ranks: {most}, two stages {two} ({source})")
    return lines


def _size(num_bytes: int) -> str:
    if num_bytes % MIB == 0 and num_bytes:
        return f"{num_bytes // MIB} MiB"
    return f"{num_bytes / KIB:g} KiB"


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
