"""A slow wire on one machine, so that overlap can be measured on two cores.

    with shaped_network(rate_mbit=200) as run:
        done = run([sys.executable, __file__, "--inside"])     # a command whose loopback is that wire

Idea. A network namespace of its own has a loopback of its own, and a token bucket on it makes transfers cost
time but no processor. Inside, `set_rate` changes the rate, for instance after compute has been measured.

    with switched_network() as run:                            # a command in whose namespace is a switch
        run([...])                                             # there, each rank calls join_switch(rank, 60)

A loopback is one wire for all ranks: who has its rows early computes while others use the wire, and even a
blocking exchange overlaps a little. On a cluster each host has a link of its own that nobody else can use:
`join_switch` gives a rank a namespace of its own and a cable to the switch, with the same rate in each
direction.

`join_host` puts several ranks into one namespace: they talk to each other over its loopback, and share its
cable to the switch, as ranks of a host share a card.

Contract. A namespace belongs to the command's process tree and ends with it, also when it is killed:
nothing is left behind and no other process sees the wire. Needs root and iproute2; where they are missing,
`shaped_network` says so and exits with status 2.

Hazards. At most 250 mbit: above that a core is busy with packets, and communication costs compute again. The
bucket holds 32 kB: a deeper one refills during compute and gives away the next transfer for nothing. Packets
are nearly as large as it may hold: each of them wakes a thread of gloo, which takes the core from a rank that
computes, and with packets of 9 kB those switches alone cost a tenth of compute. Both
directions share the loopback's queue: two ranks that send at once each see half of the rate. Cables have
Reno's congestion control, which every kernel has, so that the bed is the same on every machine.

Run alone it measures the wire, also with `--smoke`.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

MAX_MBIT = 250.0
MTU = 32000
BURST = "32kb"
MOST_BUFFERED = 512 << 10
"""Bytes that one connection may hold: with the usual 4 MB whatever is small waits a second behind rows."""
SWITCH = "switch0"
PLAIN = "BENCH_PLAIN_LOOPBACK"
CLONE_NEWNET = 0x40000000
MOST_WAIT_S = 30.0

Run = Callable[[Sequence[str]], "subprocess.CompletedProcess[bytes]"]


def why_not() -> str | None:
    """What this machine lacks for a shaped network; None where it can have one."""
    missing = [tool for tool in ("unshare", "nsenter", "sysctl", "ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"a shaped network needs {', '.join(missing)} (util-linux, procps and iproute2); install them"
    if os.geteuid() != 0:
        return "a shaped network needs root, to make a network namespace; run it with sudo"
    trial = subprocess.run(
        ["unshare", "--net", "sh", "-c", f"ip link set lo up mtu {MTU} && {_tc('add', 100)}"],
        capture_output=True,
        text=True,
    )
    if trial.returncode:
        return f"this kernel does not shape networks: {trial.stderr.strip()}"
    return None


def _tc(verb: str, rate_mbit: float, device: str = "lo") -> str:
    return f"tc qdisc {verb} dev {device} root tbf rate {rate_mbit:g}mbit burst {BURST} latency 400ms"


def _check(rate_mbit: float) -> None:
    if not 0 < rate_mbit <= MAX_MBIT:
        raise ValueError(
            f"rate_mbit ({rate_mbit:g}) must be positive and at most {MAX_MBIT:g}: "
            "faster wires cost processor time, and overlap can no longer be seen"
        )


@contextmanager
def shaped_network(rate_mbit: float, or_plain: bool = False) -> Iterator[Run]:
    """Gives `run`, which runs a command inside the namespace and returns when it has ended.

    `or_plain`: where there can be none, the command runs on the machine's own loopback, for who measures
    nothing (`--smoke`).
    """
    _check(rate_mbit)
    with _namespace(f"ip link set lo up mtu {MTU} && {_tc('add', rate_mbit)}", or_plain) as run:
        yield run


@contextmanager
def switched_network(or_plain: bool = False) -> Iterator[Run]:
    """Gives `run`, as above; in the namespace is a switch without cables."""
    with _namespace(
        f"ip link set lo up && ip link add {SWITCH} type bridge && ip link set {SWITCH} up", or_plain
    ) as run:
        yield run


def is_plain() -> bool:
    """Inside: whether this is no shaped network, but the machine's own loopback."""
    return PLAIN in os.environ


@contextmanager
def _namespace(set_up: str, or_plain: bool) -> Iterator[Run]:
    reason = why_not()
    if reason is not None:
        print(f"{reason}{'; going on without one' if or_plain else ''}", file=sys.stderr)
        if not or_plain:
            raise SystemExit(2)
    children: list[subprocess.Popen[bytes]] = []

    def run(command: Sequence[str]) -> subprocess.CompletedProcess[bytes]:
        inside = ["unshare", "--net", "sh", "-c", f'{set_up} && exec "$@"', "sh", *command]
        plain = {**os.environ, PLAIN: "1"}
        child = subprocess.Popen(inside) if reason is None else subprocess.Popen(command, env=plain)
        children.append(child)
        return subprocess.CompletedProcess(command, child.wait())

    try:
        yield run
    finally:
        for child in children:
            if child.poll() is None:
                child.terminate()
                child.wait()


def join_switch(rank: int, rate_mbit: float) -> None:
    """In a child of the process that has the switch: move to a namespace of one's own, with a cable to it.

    The cable is made by the side that has the switch (this process' parent) and goes with this process.
    """
    _check(rate_mbit)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, f"no network namespace for rank {rank}: {os.strerror(number)}")
    card, port = f"card{rank}", f"port{rank}"
    there = ["nsenter", "--net", "--target", str(os.getppid())]
    cable = f"{port} mtu {MTU} type veth peer name {card} mtu {MTU} netns {os.getpid()}"
    for command in (
        [*there, *f"ip link add {cable}".split()],
        [*there, *f"ip link set {port} master {SWITCH} up".split()],
        [*there, *_tc("add", rate_mbit, port).split()],
        f"ip addr add 10.77.0.{rank + 1}/24 dev {card}".split(),
        f"ip link set {card} up".split(),
        ["ip", "link", "set", "lo", "up"],
        ["sysctl", "-qw", "net.ipv4.tcp_congestion_control=reno"],
        ["sysctl", "-qw", f"net.ipv4.tcp_wmem=4096 16384 {MOST_BUFFERED}"],
        _tc("add", rate_mbit, card).split(),
    ):
        subprocess.run(command, check=True)
    os.environ["GLOO_SOCKET_IFNAME"] = card


def join_host(rank: int, hosts: Sequence[int], folder: str, far_mbit: float, near_mbit: float) -> None:
    """Like `join_switch`, but ranks with the same number in `hosts` share a namespace, and its cable.

    The first rank of a host makes both and says so in `folder`; its loopback has `near_mbit`.
    """
    _check(near_mbit)
    host, ready = hosts[rank], Path(folder) / f"host-{hosts[rank]}"
    if hosts.index(host) == rank:
        join_switch(host, far_mbit)
        for command in (f"ip link set lo mtu {MTU}".split(), _tc("add", near_mbit).split()):
            subprocess.run(command, check=True)
        ready.with_suffix(".new").write_text(str(os.getpid()))
        ready.with_suffix(".new").rename(ready)
        return
    end = time.monotonic() + MOST_WAIT_S
    while not ready.exists():
        if time.monotonic() > end:
            raise OSError(f"rank {hosts.index(host)} has not made the namespace of host {host}")
        time.sleep(0.01)
    with open(f"/proc/{ready.read_text()}/ns/net") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, f"rank {rank} cannot join host {host}: {os.strerror(number)}")
    os.environ["GLOO_SOCKET_IFNAME"] = f"card{host}"


def set_rate(rate_mbit: float) -> None:
    """Inside the namespace: the wire has this rate from now on."""
    _check(rate_mbit)
    if is_plain():
        return
    subprocess.run(_tc("replace", rate_mbit).split(), check=True)


def measure_wire(num_bytes: int = 4 << 20) -> float:
    """Inside the namespace: bytes per second that one connection really gets."""
    server = socket.create_server(("127.0.0.1", 0))

    def receive() -> None:
        connection, _ = server.accept()
        with connection:
            left = num_bytes
            while left:
                left -= len(connection.recv(min(left, 1 << 16)))
            connection.sendall(b"!")

    thread = threading.Thread(target=receive)
    thread.start()
    with server, socket.create_connection(server.getsockname()) as connection:
        begun = time.perf_counter()
        connection.sendall(bytes(num_bytes))
        connection.recv(1)
        seconds = time.perf_counter() - begun
    thread.join()
    return num_bytes / seconds


def main() -> int:
    from _smoke import BenchParser, write

    parser = BenchParser(__doc__, smoke={"megabytes": 0.25})
    parser.add_argument("--megabytes", type=float, default=4.0, help="that travel at each rate")
    parser.add_argument("--inside", action="store_true", help="in the namespace")
    given = parser.parse_args()
    if not given.inside:
        with shaped_network(rate_mbit=200) as run:
            return run([sys.executable, __file__, *sys.argv[1:], "--inside"]).returncode
    rows = []
    for rate in (100.0, 200.0):
        set_rate(rate)
        begun = time.process_time()
        measured = measure_wire(int(given.megabytes * (1 << 20))) * 8e-6
        busy = time.process_time() - begun
        rows.append({"asked_mbit": rate, "got_mbit": measured, "busy_s": busy})
        print(f"asked for {rate:g} mbit, got {measured:.0f} mbit, {1e3 * busy:.0f} ms of processor time")
    write(given.json, {"rows": rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
