"""Axes and groups, start and stop, and what ranks tell each other."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moeclipse.comm.config import ParallelConfig
from moeclipse.comm.mesh import Mesh
from moeclipse.comm.start import RankPlace, choose_device, start, stop
from moeclipse.core.errors import CommError, ConfigError
from moeclipse.testing.run_ranks import run_ranks

CPU = torch.device("cpu")


def axes(mesh: Mesh) -> tuple:
    return (mesh.dp_index, mesh.ep_index, mesh.experts.ranks, mesh.replicas.ranks, mesh.world.ranks)


def test_ep_runs_fastest() -> None:
    assert run_ranks(4, axes, dp=2) == [
        (0, 0, (0, 1), (0, 2), (0, 1, 2, 3)),
        (0, 1, (0, 1), (1, 3), (0, 1, 2, 3)),
        (1, 0, (2, 3), (0, 2), (0, 1, 2, 3)),
        (1, 1, (2, 3), (1, 3), (0, 1, 2, 3)),
    ]


def test_objects_of_every_rank() -> None:
    def speak(mesh: Mesh) -> list:
        return mesh.gather_objects({"rank": mesh.rank, "text": "ä" * mesh.rank})

    expected = [{"rank": 0, "text": ""}, {"rank": 1, "text": "ä"}, {"rank": 2, "text": "ää"}]
    assert run_ranks(3, speak) == [expected] * 3
    assert Mesh.single().gather_objects({"a": (1, 2)}) == [{"a": [1, 2]}]


def test_one_host_has_one_clock() -> None:
    assert run_ranks(2, lambda mesh: mesh.clock_offset()) == [(0.0, 0.0)] * 2


def offset_between_hosts(mesh: Mesh) -> tuple[float, float]:
    mesh.hosts = (0, 1)  # two hosts, as far as the mesh knows
    return mesh.clock_offset()


def test_clocks_of_two_hosts_are_compared() -> None:
    for offset, error in run_ranks(2, offset_between_hosts):
        assert abs(offset) < 0.5, "in truth both read one clock"
        assert 0 <= error < 0.5
    assert run_ranks(2, offset_between_hosts)[0][0] == 0.0, "rank 0 is the one that all speak in"


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


LIVES = """
import sys
sys.path.insert(0, sys.argv[3])
from test_mesh import start_stop_start
print(start_stop_start(int(sys.argv[1]), sys.argv[2]))
"""


def test_start_stop_start_in_one_process(tmp_path: Path) -> None:
    here = str(Path(__file__).parent)
    children = [
        subprocess.Popen(
            [sys.executable, "-c", LIVES, str(rank), str(tmp_path), here], stdout=subprocess.PIPE
        )
        for rank in range(2)
    ]
    assert [float(child.communicate(timeout=60)[0]) for child in children] == [9.0, 9.0]


RESTART = """
import os, sys, time, torch
from moeclipse.comm.mesh import Mesh
from moeclipse.comm.start import RankPlace, start, stop
place = RankPlace.read()
if place.attempt == 1 and place.rank == 1:
    time.sleep(1.0)  # the other must not read the address of its dead predecessor
watch = start(place, device=torch.device("cpu"), start_deadline_s=30)
mesh = Mesh(dp=1, ep=2, rank=place.rank, device=torch.device("cpu"), watch=watch)
mesh.barrier()
if place.attempt == 0:
    os.kill(os.getpid(), 9) if place.rank == 1 else time.sleep(60)
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
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.count("sum 1") == 2, done.stderr[-2000:]


def test_place_is_read_from_what_the_launcher_says() -> None:
    assert RankPlace.read({}) == RankPlace()
    told = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "TORCHELASTIC_RESTART_COUNT": "2"}
    assert RankPlace.read(told) == RankPlace(rank=3, num_ranks=4, local_rank=1, attempt=2)


def test_a_rank_without_an_address_says_how_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(CommError, match=r"rank 1 of 2, but MASTER_ADDR .* with torchrun"):
        start(RankPlace(rank=1, num_ranks=2), device=CPU)


def test_devices_that_are_not_there() -> None:
    assert choose_device("cpu") == CPU
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="torch sees no CUDA device"):
            choose_device("cuda")


def test_a_mesh_over_nothing_says_what_to_do() -> None:
    assert Mesh.of_world(ep=1).num_ranks == 1
    with pytest.raises(CommError, match="call init_process_group first"):
        Mesh.of_world(ep=2)


@pytest.mark.parametrize(
    ("dp", "ep", "ranks", "experts", "expected"),
    [
        ("auto", "auto", 8, 16, (1, 8)),
        ("auto", "auto", 8, 6, (2, 4)),
        (2, "auto", 8, 16, (2, 4)),
        ("auto", 2, 6, 4, (3, 2)),
    ],
)
def test_sizes_of_axes(dp, ep, ranks: int, experts: int, expected: tuple[int, int]) -> None:
    assert ParallelConfig(dp=dp, ep=ep).sizes(ranks, experts) == expected


@pytest.mark.parametrize(
    ("dp", "ep", "message"),
    [
        ("auto", 3, r"parallel.ep \(3\) must divide the number of ranks \(8\); choose 1, 2, 4, 8"),
        (3, "auto", r"must divide the number of ranks \(8\)"),
        (2, 2, r"parallel.dp \(2\) x parallel.ep \(2\) must equal the number of ranks \(8\)"),
        (1, 8, r"parallel.ep \(8\) must not exceed moe.num_experts \(4\)"),
    ],
)
def test_sizes_that_do_not_fit(dp, ep, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelConfig(dp=dp, ep=ep).sizes(8, 4)


def tensor_axes(mesh: Mesh) -> tuple:
    groups = (mesh.tensor, mesh.experts, mesh.shard_experts, mesh.data, mesh.replicas)
    return (mesh.dp_index, mesh.ep_index, mesh.tp_index, *(group.ranks for group in groups))


@pytest.mark.parametrize(("dp", "ep"), [(1, 2), (2, 1)])
def test_tp_runs_fastest(dp: int, ep: int) -> None:
    for rank, found in enumerate(run_ranks(4, tensor_axes, dp=dp, tp=2)):
        block, t = rank // 2, rank % 2
        tensor, data = (2 * block, 2 * block + 1), (t, t + 2)
        if ep == 2:
            assert found == (0, block, t, tensor, (0, 1, 2, 3), data, data, (rank,))
        else:
            assert found == (block, 0, t, tensor, tensor, (rank,), data, data)


@pytest.mark.parametrize(
    ("given", "expert_tp", "ranks", "experts", "expected"),
    [
        ({"tp": 2}, "folded", 8, 16, (1, 4)),
        ({"tp": 2}, "folded", 8, 4, (2, 2)),
        ({"tp": 2}, "sharded", 8, 4, (1, 4)),
        ({"tp": 4, "dp": 2}, "folded", 8, 4, (2, 1)),
    ],
)
def test_sizes_with_tp(given, expert_tp, ranks: int, experts: int, expected: tuple[int, int]) -> None:
    assert ParallelConfig(**given).sizes(ranks, experts, expert_tp) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tp": 3}, r"parallel.tp \(3\) must divide the number of ranks \(8\); choose 1, 2, 4, 8"),
        ({"tp": 2, "ep": 8}, r"parallel.ep \(8\) must divide the number of ranks over parallel.tp \(4\); ch"),
        ({"tp": 2, "ep": 4}, r"parallel.ep \(4\) x parallel.tp \(2\) must not exceed moe.num_experts \(4\)"),
    ],
)
def test_sizes_with_tp_that_do_not_fit(given, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelConfig(**given).sizes(8, 4)


def test_async_all_reduce_with_sequence_parallel_is_refused_with_a_reason() -> None:
    both = ParallelConfig(tp=2, sequence_parallel=True, async_all_reduce="on")
    assert "with sequence parallelism no gradient is all-reduced" in next(both.problems())
    assert not list(ParallelConfig(tp=2, sequence_parallel=False, async_all_reduce="on").problems())
    assert list(ParallelConfig(tp=0).problems()) == ["parallel.tp (0) must be at least 1"]


def test_a_lane_is_made_once() -> None:
    """A device hands out few streams; two lanes on one would wait for each other."""
    mesh = Mesh.single()
    assert mesh.lane("p2p") is mesh.lane("p2p")
    assert mesh.lane("p2p") is not mesh.lane("other")
