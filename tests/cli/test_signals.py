"""Asked to leave: ranks agree on a step, save it and end with 75; a second signal ends at once."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from apart import apart
from moeclipse.cli import signals as leaving_module
from moeclipse.cli.signals import Leaving, children, passing_on
from moeclipse.core.program import program

RUN = {
    "--model.num-layers": 1,
    "--model.d-model": 16,
    "--model.num-heads": 2,
    "--model.num-kv-heads": 1,
    "--model.head-dim": 8,
    "--moe.num-experts": 4,
    "--moe.d-ff": 12,
    "--data.seq-len": 8,
    "--data.batch-size": 2,
    "--run.device": "cpu",
    "--run.name": "r",
}


def start(folder: Path, *words: object, command: tuple[str, ...] = ("moeclipse",)) -> subprocess.Popen[str]:
    flags = [str(word) for pair in RUN.items() for word in pair]
    line = [sys.executable, "-m", *command, "train", *flags, "--run.dir", str(folder), *map(str, words)]
    return subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def lines_in(folder: Path) -> list[dict[str, float]]:
    path = folder / "r" / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def wait_for_steps(run: subprocess.Popen[str], folder: Path, steps: int) -> None:
    until = time.monotonic() + 900
    while len(lines_in(folder)) < steps:
        assert run.poll() is None, run.communicate()[1]
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.05)


def left(folder: Path, run: subprocess.Popen[str], code: int, name_of_signal: str = "SIGTERM") -> int:
    """The step of the checkpoint that a run left behind; all that it said is how to go on."""
    _, err = run.communicate(timeout=900)
    assert run.returncode == code, err
    (name,) = (path.name for path in (folder / "r" / "checkpoints").iterdir())
    step = int(name.removeprefix("step-"))
    assert len(lines_in(folder)) == step, "every step that was done is in the checkpoint"
    assert f"asked to leave ({name_of_signal}): step {step} is saved" in err
    assert err.count("\n") == 1
    assert err.rstrip().endswith(
        f"go on with: {program()} train {folder / 'r' / 'config.toml'} --resume auto"
    )
    assert not (folder / "r" / "job.json").exists()
    return step


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_to_the_launcher(tmp_path: Path, number: signal.Signals) -> None:
    run = start(tmp_path, "--ranks", 2, "--run.steps", 100_000, "--restarts", 1)
    wait_for_steps(run, tmp_path, 2)
    run.send_signal(number)
    step = left(tmp_path, run, 75, number.name)
    again = start(tmp_path, "--ranks", 2, "--run.steps", step + 1, "--resume", "auto")
    assert again.communicate(timeout=900)[1] == ""
    assert [record["step"] for record in lines_in(tmp_path)] == list(range(step + 1))


def test_a_signal_to_everyone_is_one_request(tmp_path: Path) -> None:
    """As a scheduler, or Ctrl-C in a terminal, sends it: to the launcher and to its ranks."""
    run = start(tmp_path, "--ranks", 2, "--run.steps", 100_000)
    wait_for_steps(run, tmp_path, 2)
    listings = Path(f"/proc/{run.pid}/task").glob("*/children")
    ranks = [int(pid) for listing in listings for pid in listing.read_text().split()]
    for pid in (run.pid, *ranks):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    left(tmp_path, run, 75)


@pytest.mark.full
def test_one_rank_alone(tmp_path: Path) -> None:
    run = start(tmp_path, "--ranks", 1, "--run.steps", 100_000, "--checkpoint.no-at-end")
    wait_for_steps(run, tmp_path, 2)
    run.send_signal(signal.SIGTERM)
    left(tmp_path, run, 75)


@pytest.mark.full
def test_torchrun_does_not_restart_who_left(tmp_path: Path) -> None:
    agent = (
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "3",
        "-m",
        "moeclipse",
    )
    run = start(tmp_path, "--run.steps", 100_000, command=agent)
    wait_for_steps(run, tmp_path, 2)
    run.send_signal(signal.SIGTERM)
    _, err = run.communicate(timeout=900)
    (name,) = (path.name for path in (tmp_path / "r" / "checkpoints").iterdir())
    step = int(name.removeprefix("step-"))
    assert len(lines_in(tmp_path)) == step
    assert f"asked to leave (SIGTERM): step {step} is saved" in err
    assert not (tmp_path / "r" / "job.json").exists()


@apart
def test_a_second_signal_ends_at_once() -> None:
    leaving_module.ONE_REQUEST_S = 0.2
    child = os.fork()
    if child == 0:
        with Leaving() as leaving:
            leaving.listen()
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGUSR1)  # the same moment: the same request
            time.sleep(0.5)
            if leaving.listen() != "SIGTERM":
                os._exit(1)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)
        os._exit(2)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 130


def interrupted() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(1)


@apart
def test_before_training_a_signal_interrupts() -> None:
    with Leaving() as leaving, pytest.raises(KeyboardInterrupt):
        interrupted()
    assert leaving.asked == "SIGTERM"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, "handlers are given back"


@apart
def test_a_launcher_passes_on_once_and_then_ends() -> None:
    leaving_module.ONE_REQUEST_S = 0.2
    ended: list[int] = []
    sleeper = subprocess.Popen(["sleep", "60"])
    assert sleeper.pid in children()
    with passing_on(ended.append) as asked:
        assert asked() == 0
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert sleeper.wait(5) == -signal.SIGTERM
        assert (asked(), ended) == (signal.SIGUSR1, [])
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
    assert ended == [signal.SIGTERM]


@apart
def test_after_a_rank_was_lost_a_signal_ends_at_once() -> None:
    assert hear_an_agent(ranks=1) == 7, "nobody was lost: it waits for the end of a step"
    assert hear_an_agent(ranks=2) == 143


def hear_an_agent(ranks: int) -> int:
    """The status of a training rank that hears SIGTERM; its launcher has one child left, this rank."""
    launcher, child = os.getpid(), os.fork()
    if child == 0:
        with Leaving(launcher, ranks) as leaving:
            leaving.listen()
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1.0)
            os._exit(7 if leaving.asked else 8)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
