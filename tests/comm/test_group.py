"""Groups of ranks, and hosts by name."""

from __future__ import annotations

import builtins
import socket
from typing import Any

import pytest

from moeclipse.comm.group import Group, host_id, number_hosts
from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import ConfigError
from moeclipse.testing.run_ranks import run_ranks


def test_hosts_by_name() -> None:
    assert number_hosts(["b", "a", "b"], 3) == (0, 1, 0)
    with pytest.raises(ConfigError, match="names 2 hosts, but there are 3 ranks; name one for each"):
        number_hosts(["b", "a"], 3)
    mesh = Mesh.single()
    named = Mesh(dp=1, ep=1, rank=0, device=mesh.device, watch=mesh.watch, hosts=["somewhere"])
    assert named.hosts == (0,)


def test_a_group_has_as_many_members_as_ranks() -> None:
    group = Group(name="experts", ranks=(3, 5, 8), index=1)
    assert (group.size, group.ranks[group.index], group.handle) == (3, 5, None)


def test_ranks_of_this_machine_are_on_one_host() -> None:
    names = run_ranks(2, lambda _: host_id())
    assert names[0] == names[1] == host_id()
    assert names[0]


def test_without_a_boot_id_the_name_of_the_machine_must_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError("no /proc here")

    with monkeypatch.context() as patch:
        patch.setattr(builtins, "open", refuse)
        found = host_id()
    assert found == socket.gethostname()
