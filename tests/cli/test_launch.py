"""Ranks that start, fail, restart and are interrupted, with a trainer that trains nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_trainer import put_in

from fault_bed import ranks_of
from moeclipse.cli.launch import SECRET, as_launcher, child_environment, resume_again, usable_cores
from moeclipse.train.config import RunConfig, TrainConfig

SOURCE = str(Path(__file__).parent.parent.parent / "src")


def start(folder: Path, event: str, *words: str, **environment: str) -> subprocess.Popen:
    put_in(folder)
    hidden = ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    path = f"{folder}{os.pathsep}{SOURCE}"
    command = [sys.executable, "-m", "moeclipse", "train", "--run.device", "cpu", "--run.name", "r", *words]
    return subprocess.Popen(
        command,
        cwd=folder,
        env=kept | {"FAKE_TRAINER": event, "PYTHONPATH": path, "TMPDIR": str(folder)} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run(folder: Path, event: str, *words: str, **environment: str) -> tuple[int, str, str]:
    process = start(folder, event, "--run.steps", "3", *words, **environment)
    out, err = process.communicate(timeout=900)
    return process.returncode, out, err


def seen(folder: Path, rank: int, attempt: int = 0) -> str:
    return (folder / "runs" / "r" / f"rank-{rank}-{attempt}").read_text()


def test_two_ranks_start_on_loopback_and_share_the_cores(tmp_path: Path) -> None:
    code, out, err = run(tmp_path, "ok")
    assert (code, err) == (0, "")
    assert "2 ranks (dp 1 x ep 2)" in out
    assert out.count("5.610 → 1.920") == 1, "only rank 0 shows anything"
    for rank in range(2):
        text = seen(tmp_path, rank)
        assert text.startswith(f"rank={rank} of=2 attempt=0 resume=off")
        assert "'MASTER_ADDR': '127.0.0.1'" in text
        assert "'GLOO_SOCKET_IFNAME': 'lo'" in text
        assert f"'OMP_NUM_THREADS': '{max(usable_cores() // 2, 1)}'" in text


def test_one_rank_needs_no_launcher(tmp_path: Path) -> None:
    code, out, _ = run(tmp_path, "ok", "--ranks", "1")
    assert code == 0
    assert "1 rank (dp 1" in out
    assert "'MASTER_ADDR': None" in seen(tmp_path, 0)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_unexpected_error_is_shown_once_with_its_rank_and_stack(tmp_path: Path, rank: int) -> None:
    code, _, err = run(tmp_path, f"raise:{rank}")
    assert code == 1
    assert err.count("error") == 1 + err.count("errors import")
    assert err.rstrip().endswith(f"error (rank {rank}): RuntimeError: boom")
    assert err.count("Traceback") == 1, "the victim's error is not shown"


def test_a_typed_error_is_its_text_and_its_code(tmp_path: Path) -> None:
    assert run(tmp_path, "config:1")[::2] == (2, "error: data.files: nothing there\n")


def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    code, _, err = run(tmp_path, "kill:1")
    assert code == 137
    expected = "rank 1 was killed by SIGKILL; the system may have run out of memory (see dmesg)"
    assert err == f"error: {expected}\n"


def test_an_exit_status_is_passed_on(tmp_path: Path) -> None:
    assert run(tmp_path, "exit:1")[::2] == (7, "error: rank 1 ended with status 7\n")


def test_a_restarted_attempt_resumes(tmp_path: Path) -> None:
    code, out, err = run(tmp_path, "raise:1", "--restarts", "2")
    assert (code, err) == (0, "restart 1 of 2: RuntimeError: boom\n")
    assert "resume=off" in seen(tmp_path, 0, 0)
    assert "resume=auto" in seen(tmp_path, 0, 1)
    assert "→ 1.920" in out


def test_bad_input_is_not_tried_again(tmp_path: Path) -> None:
    code, _, err = run(tmp_path, "config:0", "--restarts", "2")
    assert (code, err) == (2, "error: data.files: nothing there\n")
    assert not (tmp_path / "runs" / "r" / "rank-0-1").exists()


def test_under_torchrun_it_joins(tmp_path: Path) -> None:
    place = {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "job"}
    code, out, _ = run(tmp_path, "ok", **place)
    assert (code, out) == (0, "")
    assert seen(tmp_path, 1).startswith("rank=1 of=2")


def test_under_torchrun_restarts_need_a_name(tmp_path: Path) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_MAX_RESTARTS": "3"}
    code, _, err = run(tmp_path, "ok", "--run.name=", **place)
    assert code == 2
    assert "run.name is empty: torchrun with --max-restarts needs one" in err


@pytest.fixture
def stuck(tmp_path: Path) -> Iterator[subprocess.Popen]:
    """A run whose rank 1 waits in C code for ever."""
    process = start(tmp_path, "stuck:1", "--run.steps", "3")
    wait_for(lambda: (tmp_path / "runs" / "r" / "rank-1-0").exists(), 900)
    time.sleep(0.3)
    yield process
    process.kill()
    process.communicate()


def wait_for(condition: object, seconds: float) -> None:
    until = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.05)


def test_ctrl_c_ends_all_ranks_even_a_stuck_one(stuck: subprocess.Popen) -> None:
    assert len(ranks_of(stuck.pid)) == 2
    os.kill(stuck.pid, signal.SIGINT)
    _, err = stuck.communicate(timeout=900)  # the agent of this trainer waits for an hour
    assert (stuck.returncode, err) == (130, "interrupted\n")
    assert not ranks_of(stuck.pid)


def test_ranks_end_when_the_launcher_is_killed(stuck: subprocess.Popen) -> None:
    os.kill(stuck.pid, signal.SIGKILL)
    wait_for(lambda: not ranks_of(stuck.pid), 300)


def test_terminate_is_passed_on(stuck: subprocess.Popen) -> None:
    os.kill(stuck.pid, signal.SIGTERM)
    stuck.communicate(timeout=900)
    assert stuck.returncode == 143
    assert not ranks_of(stuck.pid)


def test_what_the_user_set_stays() -> None:
    assert "OMP_NUM_THREADS" not in child_environment(2, {"OMP_NUM_THREADS": "7"})
    assert child_environment(10**6, {})["OMP_NUM_THREADS"] == "1"
    assert {child_environment(2, {})[f"{name}_SOCKET_IFNAME"] for name in ("GLOO", "NCCL")} == {"lo"}
    assert "TORCH_CPP_LOG_LEVEL" not in child_environment(2, {"TORCH_CPP_LOG_LEVEL": "INFO"})


def test_ranks_get_a_secret_of_their_run_and_nobody_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET, raising=False)
    found = []
    for _ in range(2):
        with as_launcher(2):
            found.append(os.environ[SECRET])
    assert SECRET not in os.environ
    assert [len(bytes.fromhex(one)) for one in found] == [32, 32]
    assert found[0] != found[1]


def test_a_restart_goes_back_to_the_given_checkpoint_until_it_has_its_own(tmp_path: Path) -> None:
    config = TrainConfig(run=RunConfig(dir=str(tmp_path), name="r"))
    (tmp_path / "r").mkdir()
    assert resume_again(config, "off", 1, first=True) == "auto"
    assert resume_again(config, "other", 1, first=True) == "other"
    assert (tmp_path / "r.attempt-0").exists()
    (tmp_path / "r" / "checkpoints" / "step-00000001").mkdir(parents=True)
    assert resume_again(config, "other", 2, first=True) == "auto"
