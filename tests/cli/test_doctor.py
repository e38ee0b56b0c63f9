"""Doctor: what it looks at, what it advises, and its exit status."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from moeclipse.cli import checks, peers
from moeclipse.cli.checks import Item
from moeclipse.cli.doctor import can_train, main, render


def by_name(items: object) -> dict[str, Item]:
    return {item.name: item for item in items}  # type: ignore[attr-defined]


@pytest.mark.peer_memory
def test_json_covers_every_section_and_training_can_run(
    capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    assert main(["--json", "--dir", str(tmp_path / "not" / "yet")]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["can_train"] is True
    sections = {item["section"] for item in report["items"]}
    assert sections == {
        "versions", "back ends", "devices", "peer memory", "machine", "network", "environment",
    }  # fmt: skip
    lines = [item["value"] for item in report["items"] if item["name"] == "cpu"]
    assert lines[0].startswith("2 ranks: any size, two stages never")
    reduced = next(item for item in report["items"] if item["name"] == "all-reduce")
    assert reduced["state"] == "works"
    assert "ranks share memory; two of them reduced 64 KB in " in reduced["value"]
    gloo = next(item for item in report["items"] if item["name"] == "gloo")
    assert gloo["state"] == "works"
    assert all(item["advice"] for item in report["items"] if item["state"] in ("limited", "broken"))


def test_gloo_that_does_not_answer_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "try_gloo", lambda: (0.0, "no answer in 30 s"))
    item = by_name(checks.backends())["gloo"]
    assert (item.state, item.value) == ("broken", "no answer in 30 s")
    assert not can_train([item])


def test_peer_memory_that_cannot_be_had_is_said_with_the_reason() -> None:
    item = by_name(peers.peers((False, "peer memory needs 8.1 MiB in /dev/shm")))["all-reduce"]
    assert (item.state, item.value) == ("limited", "peer memory needs 8.1 MiB in /dev/shm")
    assert can_train([item])


def test_gloo_failures_are_reported_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "torch.distributed.init_process_group", lambda *a, **k: (_ for _ in ()).throw(OSError("nix"))
    )
    assert checks.try_gloo() == (0.0, "nix")


def test_missing_packages_say_what_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "version_of", lambda name: None)
    items = by_name(checks.versions())
    assert (items["torch"].state, items["torch"].advice) == ("broken", "pip install torch")
    assert items["rich"].state == "limited"
    assert (
        items["tensorboard"].advice
        == "metrics.tensorboard does not work; pip install 'moeclipse[tensorboard]'"
    )


def test_an_old_torch_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "version_of", lambda name: "2.9.1+cpu")
    assert by_name(checks.versions())["torch"].advice == "use torch >= 2.11"


@pytest.mark.parametrize(
    ("name", "value", "state", "advice"),
    [
        ("OMP_NUM_THREADS", "100000", "limited", "more threads than cores"),
        ("OMP_NUM_THREADS", "1", "info", "overrides cores // ranks"),
        ("CUDA_VISIBLE_DEVICES", "", "limited", "hides all GPUs"),
        ("CUDA_VISIBLE_DEVICES", "0,1", "info", "only these GPUs"),
        (
            "CUDA_DEVICE_MAX_CONNECTIONS",
            "1",
            "limited",
            "nothing overlaps; unset it (our ordering never depends",
        ),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "32", "info", "our ordering never depends on it"),
        ("GLOO_SOCKET_IFNAME", "nix0", "broken", "no interface nix0 here; there are "),
        ("GLOO_SOCKET_IFNAME", "lo", "info", "ranks talk over this interface"),
        ("NCCL_SOCKET_IFNAME", "nix", "limited", "no interface nix"),
        ("NCCL_P2P_DISABLE", "1", "limited", "copy through the host"),
        ("NCCL_DEBUG", "INFO", "info", "passed on to NCCL"),
        ("RANK", "0", "limited", "would join other ranks instead of starting its own"),
    ],
)
def test_environment_variables(name: str, value: str, state: str, advice: str) -> None:
    item = by_name(checks.environment({name: value}))[name]
    assert item.state == state
    assert advice in item.advice


def test_an_unset_environment_is_fine() -> None:
    assert {item.state for item in checks.environment({})} == {"info"}


def test_a_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    item = by_name(checks.machine(str(tmp_path)))["disk"]
    assert item.state == "broken"
    assert "choose another folder with --run.dir" in item.advice


def test_namespaces_leave_nothing_behind() -> None:
    problem = checks.try_namespace()
    if problem:
        pytest.skip(problem)
    assert (
        f"moeclipse-{os.getpid()}"
        not in subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout
    )


def test_namespaces_without_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.shutil, "which", lambda tool: None)
    assert checks.try_namespace() == "no ip and no tc command"


def test_rendering_in_ascii_and_verdict() -> None:
    items = [
        Item(section="a", name="x", state="works", value="1"),
        Item(section="a", name="y", state="broken", value="0", advice="mend it"),
    ]
    lines = list(render(items, unicode=False, coloured=False))
    assert lines == [
        "a",
        "  ok x  1",
        "  XX y  0",
        "       -> mend it",
        "",
        "Training cannot run here yet: mend y.",
    ]
    assert (
        list(render(items[:1], unicode=True, coloured=False))[-1] == "Training can run here: moeclipse train."
    )


def test_help_and_typos(capsys: pytest.CaptureFixture) -> None:
    from moeclipse.cli.main import main as command_line

    assert main(["--help"]) == 0
    assert "--json" in capsys.readouterr().out
    assert command_line(["doctor", "--jsno"]) == 2
    assert "did you mean json?" in capsys.readouterr().err
