"""What a layer is given, checked: all that is wrong with it is said in one error, before any rank waits.

`top_k` may be given beside a gate that says it, too; then both must say the same. A number that nobody gave
is told from one that somebody did by what it is, not by what it equals.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from moeclipse.balance.placement import Placement
from moeclipse.comm.group import Group
from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import named_in, problems_of, with_values
from moeclipse.core.errors import ConfigError
from moeclipse.moe.config import LAYER_KEYS, ExchangeConfig, GateConfig, MoEConfig, layer_problems
from moeclipse.moe.experts.module_experts import Joint


class NotGiven(int):
    """A number that stands for itself where nobody gave another."""


TOP_K = NotGiven(2)


GivenGate = GateConfig | nn.Module | Mapping[str, Any] | str
GivenExchange = ExchangeConfig | Mapping[str, Any] | str
GivenMesh = Mesh | DeviceMesh


SIZES = ("d_model", "d_ff", "num_experts", "d_out")
IN_CONFIG = ("d_ff", "num_experts")
"""Sizes whose least value the configuration checks, with all else."""
NUMBERS = ("init_std", "down_std")
TYPES: Mapping[str, tuple[tuple[type, ...], str]] = {
    "gate": ((GateConfig, nn.Module, Mapping, str), "a name, a dict, a GateConfig or a module"),
    "exchange": ((ExchangeConfig, Mapping, str), "a name, a dict or an ExchangeConfig"),
    "mesh": ((Mesh, DeviceMesh), "a moeclipse.Mesh or a torch DeviceMesh"),
    "placement": ((Placement,), "a moeclipse.Placement"),
    "dtype": ((torch.dtype,), "a torch.dtype"),
}


def check_types(**given: object) -> None:
    """Arguments of a layer, by name, before anything is asked of them; None is left out."""
    problems = []
    for name, value in given.items():
        if value is None:
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool)
        whole = number and isinstance(value, int) and (value >= 1 or name in IN_CONFIG)
        if name in SIZES and not whole:
            problems.append(f"{name} ({value!r}) must be a whole number of at least 1")
        elif name in NUMBERS and not number:
            problems.append(f"{name} ({value!r}) must be a number")
        elif name in TYPES and not isinstance(value, TYPES[name][0]):
            problems.append(f"{name} ({value!r}) must be {TYPES[name][1]}")
    if problems:
        raise ConfigError(problems)


def given_mesh(mesh: GivenMesh | None) -> Mesh | None:
    return Mesh.of_device_mesh(mesh) if isinstance(mesh, DeviceMesh) else mesh


def given_gate(gate: GivenGate | None, top_k: int) -> GateConfig:
    """How ours chooses; of a module of one's own, what it says of losses. A name is a `kind`."""
    if isinstance(gate, nn.Module):
        said = getattr(gate, "config", None)
        return said if isinstance(said, GateConfig) else GateConfig(top_k=1, balance_loss=0.0)
    if isinstance(gate, str):
        gate = {"kind": gate}
    if gate is None or (isinstance(gate, Mapping) and "top_k" not in gate):
        values = {} if gate is None else dict(gate)
        usual = 1 if values.get("kind") == "switch" else int(top_k)  # Switch has one expert for each token
        values["top_k"] = usual if isinstance(top_k, NotGiven) else top_k
        return with_values(GateConfig(), values)
    if isinstance(gate, Mapping):
        gate = with_values(GateConfig(), gate)
    if not isinstance(top_k, NotGiven) and top_k != gate.top_k:
        raise ConfigError(
            f"top_k ({top_k}) and gate.top_k ({gate.top_k}) say different things; leave out top_k, or set "
            f"GateConfig(top_k={top_k})"
        )
    return gate


def given_device(device: torch.device | str | None, mesh: Mesh | None) -> torch.device:
    """Where weights are made: as said; inside `with torch.device("meta")` nowhere; else where the mesh is."""
    if device is not None:
        return torch.device(device)
    default = torch.get_default_device()
    if mesh is None or default.type == "meta":
        return default
    return mesh.device


def alone(device: torch.device) -> Mesh:
    """The mesh of a layer that nobody gave one; weights that are nowhere yet will be somewhere."""
    return Mesh.single("cpu" if device.type == "meta" else device)


def alike(device: torch.device, other: torch.device) -> bool:
    """Whether two names mean one device, as far as they say; weights that are nowhere are alike to all."""
    if device.type == "meta":
        return True
    return device.type == other.type and (device.index or 0) == (other.index or 0)


def settled(config: MoEConfig, gate: GateConfig) -> MoEConfig:
    """Without a choice that there is not: units cannot be padded one by one."""
    if config.schedule == "auto" and gate.overflow == "pad":
        return replace(config, schedule="blocking")
    return config


def is_sharded(mesh: Mesh, config: MoEConfig) -> bool:
    """Whether each tp rank has a part of every expert."""
    return config.expert_tp == "sharded" and mesh.tp > 1


def expert_group(mesh: Mesh, config: MoEConfig) -> Group:
    """The ranks among which rows travel."""
    return mesh.shard_experts if is_sharded(mesh, config) else mesh.experts


def check_place(placement: Placement, group: Group, ids: tuple[int, ...]) -> None:
    """A layer holds the weights of some experts: another place in the group would take them for others'."""
    if placement.num_ranks != group.size:
        raise ConfigError(
            f"the layer's experts are shared by {placement.num_ranks} ranks, but the mesh gives it "
            f"{group.size}; attach it to a mesh with ep x tp = {placement.num_ranks}"
        )
    if placement.slots[group.index] != tuple(ids):
        raise ConfigError(
            f"the layer holds experts {list(ids)}, but place {group.index} of the mesh has "
            f"{list(placement.slots[group.index])}; each rank must attach the layer that it saved"
        )


def given_exchange(given: GivenExchange | None) -> ExchangeConfig:
    """A name is a `schedule`."""
    if isinstance(given, str):
        given = {"schedule": given}
    return given if isinstance(given, ExchangeConfig) else with_values(ExchangeConfig(), given or {})


def check(
    config: MoEConfig,
    gate: GateConfig,
    mesh: Mesh,
    group: Group,
    placement: Placement | None,
    experts: Callable[[int], nn.Module] | Joint | None = None,
) -> None:
    """All that is wrong with a layer, in one error."""
    problems = [*problems_of(config, "moe."), *problems_of(gate, "gate.")]
    if named_in(" ".join(problems), LAYER_KEYS):
        raise ConfigError(problems)
    problems += layer_problems(config, gate, mesh.tp)
    if placement is not None:
        given, expected = (placement.num_experts, placement.num_ranks), (config.num_experts, group.size)
        if given != expected:
            problems.append(
                f"the placement has {given[0]} experts on {given[1]} ranks, but the layer has {expected[0]} "
                f"experts on {expected[1]} ranks"
            )
        if experts is not None and any(len(ranks) > 1 for ranks in placement.holders):
            problems.append(
                "a placement with replicas needs experts whose initial weights follow from their numbers; "
                "modules of your own may stand on one rank each"
            )
    elif group.size > config.num_experts:
        axes = f"ep ({mesh.ep})" if group.size == mesh.ep else f"ep x tp ({group.size})"
        problems.append(f"{axes} must not exceed num_experts ({config.num_experts})")
    if isinstance(experts, Joint) and group.size > 1 and config.shadow not in ("off", ()):
        problems.append(
            f"moe.shadow ({config.shadow!r}) cannot go with one module for all experts, which cannot "
            "shadow one; set it to 'off', or give a module for each expert"
        )
    if problems:
        raise ConfigError(problems)
