"""A rehearsal of two hosts with two ranks each: network namespaces, a cable, and a layer in two levels.

Network namespaces share the boot id by which a mesh tells hosts apart, so the hosts are named here.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import test_cluster
import torch

from cables import Host

LAYER_TESTS = str(Path(__file__).parent.parent / "moe")
sys.path.insert(0, LAYER_TESTS)
from layer_parity import compare, run  # noqa: E402

from moeclipse.moe.config import GateConfig  # noqa: E402
from moeclipse.testing.run_ranks import run_alone  # noqa: E402

hosts = test_cluster.hosts
SIZES = [5, 0, 9, 4]

# One process per host; it forks its two ranks, because importing torch takes longer than all the rest.
HOST = """
import os, sys
from datetime import timedelta
host, address, folder, tests = int(sys.argv[1]), *sys.argv[2:5]
sys.path.insert(0, tests)
import torch, torch.distributed as dist
from layer_parity import run
from moeclipse.comm.mesh import Mesh
from moeclipse.comm.start import RankPlace, start, stop
from moeclipse.comm.transports.two_level import TwoLevelTransport, two_level
from moeclipse.moe.config import GateConfig

def rank_main(rank):
    store = dist.TCPStore(address, 29511, 4, is_master=rank == 0, timeout=timedelta(seconds=60))
    place = RankPlace(rank=rank, num_ranks=4, local_rank=rank % 2, local_ranks=2)
    cpu = torch.device("cpu")
    watch = start(place, device=cpu, deadline_s=30, start_deadline_s=60, store=store)
    mesh = Mesh(dp=1, ep=4, rank=rank, device=cpu, watch=watch, hosts=["a", "a", "b", "b"])
    assert isinstance(two_level(mesh, mesh.experts), TwoLevelTransport)
    found = []
    for exchange in ({}, {"schedule": "smart", "chunks": 2, "shadow": (1, 6)}):
        more = {"exchange": {"transport": "two_level", **exchange}}
        found.append(run(mesh, GateConfig(top_k=3), 8, 0, [5, 0, 9, 4], more))
    torch.save(found, f"{folder}/rank-{rank}.pt")
    mesh.barrier()
    stop()

children = []
for rank in (2 * host, 2 * host + 1):
    child = os.fork()
    if child == 0:
        try:
            rank_main(rank)
            os._exit(0)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
    children.append(child)
sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0 for child in children))
"""


@pytest.mark.root
def test_a_layer_on_two_hosts_in_two_levels(tmp_path: Path, hosts: list[Host]) -> None:
    (tmp_path / "host.py").write_text(HOST)
    nodes = []
    for number, host in enumerate(hosts):
        command = ["ip", "netns", "exec", host.space, sys.executable, "host.py", str(number)]
        command += [hosts[0].address]
        environment = test_cluster.clean_environment() | {"GLOO_SOCKET_IFNAME": host.interface}
        node = subprocess.Popen(
            [*command, str(tmp_path), LAYER_TESTS],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        nodes.append(node)
    try:
        outputs = [node.communicate(timeout=900)[0] for node in nodes]
    finally:
        for node in nodes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(node.pid, signal.SIGKILL)  # the ranks it forked, too
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(outputs)
    reference = run_alone(run, GateConfig(top_k=3), 8, 0, [sum(SIZES)])
    ranks = [torch.load(tmp_path / f"rank-{rank}.pt", weights_only=True) for rank in range(4)]
    for way in range(2):
        compare([found[way] for found in ranks], reference, 1, 4)
