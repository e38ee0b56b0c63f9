"""Hosts for tests: two network namespaces joined by a cable, which can be pulled. Needs root and iproute2.

with two_hosts() as hosts: ...         # raises OSError where there are none to be had
hosts[1].enter()                       # in a process of its own: from here on it lives there
hosts[1].pull()
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CLONE_NEWNET = 0x40000000


@dataclass(frozen=True, kw_only=True)
class Host:
    space: str
    interface: str
    address: str

    def enter(self) -> None:
        """This process and its children live there from now on, and gloo uses the cable."""
        libc = ctypes.CDLL(None, use_errno=True)
        with (Path("/var/run/netns") / self.space).open() as space:
            if libc.setns(space.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter {self.space}")
        os.environ["GLOO_SOCKET_IFNAME"] = self.interface

    def pull(self) -> None:
        """The cable, at this end; the other end keeps its address."""
        ip("-n", self.space, "link", "set", self.interface, "down")


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


@contextlib.contextmanager
def two_hosts() -> Iterator[list[Host]]:
    """They reach each other and nothing else."""
    if os.geteuid() != 0:
        raise OSError("network namespaces need root")
    if shutil.which("ip") is None:
        raise OSError("network namespaces need iproute2 (the `ip` command)")
    mark = f"{os.getpid() % 100000}"
    hosts = [
        Host(space=f"moeclipse-{mark}-{side}", interface=f"moe{mark}{side}", address=f"10.213.7.{n}")
        for n, side in ((1, "a"), (2, "b"))
    ]
    try:
        ip("link", "add", hosts[0].interface, "type", "veth", "peer", "name", hosts[1].interface)
        for host in hosts:
            ip("netns", "add", host.space)
            ip("link", "set", host.interface, "netns", host.space)
            ip("-n", host.space, "addr", "add", f"{host.address}/24", "dev", host.interface)
            ip("-n", host.space, "link", "set", host.interface, "up")
            ip("-n", host.space, "link", "set", "lo", "up")
        yield hosts
    finally:
        for host in hosts:
            # Removing a namespace removes the cable in it; the cable goes by hand if it never got there.
            for words in (["link", "delete", host.interface], ["netns", "delete", host.space]):
                with contextlib.suppress(OSError):
                    ip(*words)
