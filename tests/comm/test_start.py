"""Start, stop and start again: in one process, after a restart, alone, and without an address."""

from __future__ import annotations

import multiprocessing
import socket
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moeclipse.comm.mesh import Mesh
from moeclipse.comm.start import (
    GRAPHS,
    MPS,
    RankPlace,
    choose_device,
    cuda_settings,
    device_settings,
    interface_of,
    listen_at,
    nccl_settings,
    open_log,
    open_stacks,
    open_store,
    rank_folder,
    shared_gpu_settings,
    shared_secret,
    start,
    stop,
)
from moeclipse.core.errors import CommError, ConfigError

CPU = torch.device("cpu")


def start_stop_start(rank: int, folder: str) -> float:
    """Three lives of one process over one store; the second has other groups than the first."""
    store = dist.FileStore(f"{folder}/store", 2)
    place = RankPlace(rank=rank, num_ranks=2)
    total = 0.0
    for life in range(3):
        watch = start(place, device=CPU, start_deadline_s=20, store=store)
        mesh = Mesh(dp=1 + life % 2, ep=2 - life % 2, rank=rank, device=CPU, watch=watch)
        total += sum(mesh.gather_objects(rank + life))
        stop()
        stop()  # twice is harmless
        assert not dist.is_initialized()
    return total


RESTART = """
import os, sys, time, torch
from moeclipse.comm.mesh import Mesh
from moeclipse.comm.start import RankPlace, start, stop
place = RankPlace.read()
if place.attempt == 1 and place.rank == 1:
    time.sleep(1.0)  # the other must not read the address of its dead predecessor
watch = start(place, device=torch.device("cpu"), start_deadline_s=300)
mesh = Mesh(dp=1, ep=2, rank=place.rank, device=torch.device("cpu"), watch=watch)
mesh.barrier()
if place.attempt == 0:
    os.kill(os.getpid(), 9) if place.rank == 1 else time.sleep(600)
sys.stdout.write(f"sum {sum(mesh.gather_objects(place.rank))}\\n")  # one write: lines must not mix
stop()
"""


def test_a_restarted_attempt_does_not_meet_its_dead_predecessor(tmp_path: Path) -> None:
    script = tmp_path / "restart.py"
    script.write_text(RESTART)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(port), str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.stdout.count("sum 1") == 2, done.stderr[-2000:]


def test_place_is_read_from_what_the_launcher_says() -> None:
    assert RankPlace.read({}) == RankPlace()
    told = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "TORCHELASTIC_RESTART_COUNT": "2"}
    assert RankPlace.read(told) == RankPlace(rank=3, num_ranks=4, local_rank=1, attempt=2)


def test_a_rank_without_an_address_says_how_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(CommError, match=r"rank 1 of 2, but MASTER_ADDR .* with torchrun"):
        start(RankPlace(rank=1, num_ranks=2), device=CPU)


def test_the_interface_that_transports_were_told_to_use() -> None:
    assert interface_of({}) == ""
    assert interface_of({"NCCL_SOCKET_IFNAME": "=eth1,eth2"}) == "eth1"
    assert interface_of({"NCCL_SOCKET_IFNAME": "eth1", "GLOO_SOCKET_IFNAME": "eth0"}) == "eth0"


def test_a_lost_peer_does_not_keep_a_rank_from_leaving(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transport takes a group apart only when what is under way on it has timed out."""
    taken_apart, may_end = threading.Event(), threading.Event()

    def destroy() -> None:
        may_end.wait(60)
        taken_apart.set()

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", destroy)
    stop(0.05)
    assert not taken_apart.is_set()
    may_end.set()
    stop()
    assert taken_apart.is_set(), "without a lost peer it is waited for"


@pytest.mark.parametrize("patience_s", [None, 5.0])
def test_graphs_are_gone_before_groups_are_left(
    monkeypatch: pytest.MonkeyPatch, patience_s: float | None
) -> None:
    """NCCL would wait for ever for whoever still holds a graph with a transfer in it."""
    done = []

    class Graph:
        def reset(self) -> None:
            done.append("graph")

    held, dropped = Graph(), Graph()
    GRAPHS.add(held)
    GRAPHS.add(dropped)
    del dropped
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: done.append("groups"))
    stop(patience_s)
    assert done == ["graph", "groups"]


def test_devices_that_are_not_there() -> None:
    assert choose_device("cpu") == CPU
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="torch sees no CUDA device"):
            choose_device("cuda")


def test_one_rank_alone_opens_nothing() -> None:
    watch = start(RankPlace(), device=CPU, deadline_s=5)
    assert (watch.store, watch.num_ranks, watch.deadline_s) == (None, 1, 5)
    assert not dist.is_initialized()
    stop()


def lives(rank: int, folder: str) -> None:
    assert start_stop_start(rank, folder) == 9.0


def test_start_stop_start_in_one_process(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=lives, args=(rank, str(tmp_path)), daemon=True) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
        assert rank.exitcode == 0


def test_the_store_is_where_the_launcher_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 serves it, unless the launcher does: then all are its clients, however many there are."""
    made: list[tuple[Any, ...]] = []

    def store(*given: Any, is_master: bool, timeout: timedelta, master_listen_fd: int | None) -> None:
        assert master_listen_fd is None, "nobody can listen somewhere"
        made.append((*given, is_master))

    monkeypatch.setattr(dist, "TCPStore", store)
    monkeypatch.setenv("MASTER_ADDR", "somewhere")
    monkeypatch.setenv("MASTER_PORT", "4711")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    for rank in range(2):
        open_store(RankPlace(rank=rank, num_ranks=2), timedelta(seconds=1))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    open_store(RankPlace(rank=0, num_ranks=2), timedelta(seconds=1))
    where = ("somewhere", 4711)
    assert made == [(*where, 2, True), (*where, 2, False), (*where, None, False)]


def test_the_store_listens_on_the_address_by_which_ranks_know_it() -> None:
    for host, here in (("127.0.0.1", False), ("localhost", True), ("::1", False)):
        listener = listen_at(host, 0, here)
        if listener is None:
            assert host == "::1", "a machine may have no IPv6"
            continue
        with listener:
            assert listener.getsockname()[0] in ("127.0.0.1", "::1")
    assert listen_at("localhost", 0, here=False) is None, "other hosts may know the name by another address"
    assert listen_at("192.0.2.1", 0, here=False) is None, "not an address of this host"


def test_a_store_that_is_opened_cannot_be_reached_by_another_address(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    place = RankPlace(rank=0, num_ranks=1, local_ranks=1)
    with socket.socket() as elsewhere, socket.socket() as there:
        store = open_store(place, timedelta(seconds=20))
        there.connect(("127.0.0.1", port))
        with pytest.raises(ConnectionRefusedError):
            elsewhere.connect(("127.0.0.2", port))
        del store


def test_a_secret_that_was_handed_down_is_part_of_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "broadcast", lambda drawn, _root: drawn.fill_(7))
    monkeypatch.delenv("MOECLIPSE_SECRET", raising=False)
    without = shared_secret(CPU)
    monkeypatch.setenv("MOECLIPSE_SECRET", "abc")
    assert shared_secret(CPU) != without
    assert shared_secret(CPU) == shared_secret(CPU), "what is drawn is rank 0's"


def test_our_deadline_speaks_before_torch_does() -> None:
    settings = nccl_settings(60.0)
    assert settings["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert settings["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] == "480"
    assert nccl_settings(1000.5)["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] == "4004"


def test_ranks_that_share_a_gpu_are_hosts_to_nccl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    ways = {"pp": 1, "deadline_s": 60.0}
    for local, backend, shares in ((2, "nccl", False), (4, "nccl", True), (4, "auto", False)):
        place = RankPlace(rank=3, num_ranks=4, local_rank=3, local_ranks=local)
        settings = device_settings(place, backend=backend, **ways)  # type: ignore[arg-type]
        assert ("NCCL_HOSTID" in settings) == shares
    monkeypatch.delenv(MPS, raising=False)
    monkeypatch.setattr("moeclipse.comm.start.MPS_DEFAULT", str(tmp_path / "default"))
    assert shared_gpu_settings(3, 4) == {
        "NCCL_HOSTID": "rank-3",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
    }


@pytest.mark.parametrize("named", [True, False], ids=["named", "where the driver looks"])
def test_ranks_under_mps_share_its_queues(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, named: bool
) -> None:
    monkeypatch.delenv(MPS, raising=False)
    if named:
        monkeypatch.setenv(MPS, str(tmp_path))
    else:
        monkeypatch.setattr("moeclipse.comm.start.MPS_DEFAULT", str(tmp_path))
    (tmp_path / "control").touch()
    assert shared_gpu_settings(3, 4)["CUDA_DEVICE_MAX_CONNECTIONS"] == "16"


def test_a_log_that_cannot_be_written_keeps_no_rank_from_starting(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    place = RankPlace(rank=1, num_ranks=2)
    assert open_log(place, on_device=False).text().startswith("rank 1 on ")
    assert (tmp_path / "ops.txt").exists()
    assert open_stacks() is not None
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "gone" / "error.json"))
    open_log(place, on_device=False)
    assert open_stacks() is None
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    assert rank_folder() is None


def test_kernels_are_loaded_at_the_start_where_stages_wait_for_each_other() -> None:
    """A kernel that is loaded later waits for a transfer that may wait for this very host."""
    assert "CUDA_MODULE_LOADING" not in cuda_settings(pp=1)
    assert cuda_settings(pp=2)["CUDA_MODULE_LOADING"] == "EAGER"
    assert cuda_settings(pp=1)["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
