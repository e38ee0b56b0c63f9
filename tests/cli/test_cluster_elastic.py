"""Two hosts under torchrun --nnodes 1:2: one is lost, the other goes on alone, and it comes back."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from elastic_bed import RUN, SITE, SOURCE, ended, losses, records, start, wait_for

from cables import Host, ip, two_hosts

MEETING = "join_timeout=120,last_call_timeout=4,keep_alive_interval=1,keep_alive_max_attempt=3"


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    with contextlib.ExitStack() as stack:
        try:
            found = stack.enter_context(two_hosts())
        except OSError as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield found


def agent(folder: Path, hosts: list[Host], number: int, *words: object) -> subprocess.Popen[str]:
    """torchrun on one host."""
    host = hosts[number]
    (folder / "sitecustomize.py").write_text(SITE)
    torchrun = ["-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1", "--rdzv-id", "job"]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{hosts[0].address}:29500"]
    torchrun += ["--rdzv-conf", f"is_host={int(number == 0)},{MEETING}", "--max-restarts", "3"]
    torchrun += [
        "--local-addr",
        host.address,
        "-m",
        "moeclipse",
        "train",
        "--ranks",
        "1:2",
        "--resume",
        "auto",
    ]
    flags = [str(word) for key, value in RUN.items() for word in (f"--{key}", value)]
    hidden = ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    kept |= {"PYTHONPATH": f"{folder}{os.pathsep}{SOURCE}", "OMP_NUM_THREADS": "1"}
    kept["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    command = ["ip", "netns", "exec", host.space, sys.executable, *torchrun, *flags, *map(str, words)]
    return subprocess.Popen(
        command,
        cwd=folder,
        env=kept | {"GLOO_SOCKET_IFNAME": host.interface},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def end(agent: subprocess.Popen[str], host: Host) -> str:
    """The host is gone: no process on it ends in good order."""
    pids = subprocess.run(["ip", "netns", "pids", host.space], capture_output=True, text=True, check=True)
    for pid in pids.stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    return agent.communicate(timeout=600)[0]


@pytest.mark.root
@pytest.mark.full
@pytest.mark.parametrize("during", ["hold-7", "hold-save-6"])
def test_a_host_is_lost_for_good_and_another_comes(tmp_path: Path, hosts: list[Host], during: str) -> None:
    """In a step, or while a save is in flight that only the other host can end."""
    words = ("--run.steps", 40, "--checkpoint.every", 2, "--optim.lr", "1e-4", "--parallel.deadline-s", 6)
    code, _, err = ended(start(tmp_path, "--ranks", 1, *words, "--run.name", "alone"))
    assert code == 0, err
    (tmp_path / during).touch()
    running = [agent(tmp_path, hosts, number, *words) for number in (0, 1)]
    outputs = []
    try:
        wait_for(lambda: all((tmp_path / f"held-{rank}").exists() for rank in (0, 1)), running[0])
        hosts[1].pull()
        (tmp_path / "slow").write_text("0.5")
        (tmp_path / during).unlink()
        wait_for(lambda: len(records(tmp_path)) >= 9, running[0])
        outputs.append(end(running.pop(), hosts[1]))
        ip("-n", hosts[1].space, "link", "set", hosts[1].interface, "up")
        running.append(agent(tmp_path, hosts, 1, *words))
        outputs += [one.communicate(timeout=300)[0] for one in running]
        assert [one.returncode for one in running] == [0, 0], "\n".join(outputs)
    finally:
        outputs += [end(one, host) for one, host in zip(running, hosts, strict=False) if one.poll() is None]
        print(*outputs, sep="\n=====\n")
    shown = [line.split(" · ")[1] for text in outputs for line in text.splitlines() if "(dp 1" in line]
    assert sorted(shown) == ["1 rank (dp 1 x ep 1)", "2 ranks (dp 1 x ep 2)", "2 ranks (dp 1 x ep 2)"]
    if "save" in during:
        assert "resumed after step 4" in "".join(outputs), (
            "the save before: this one had begun and never ended"
        )
    assert len(losses(tmp_path)) == 40
    assert losses(tmp_path) == pytest.approx(losses(tmp_path, "alone"), rel=1e-12)
