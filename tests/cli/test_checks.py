"""What doctor looks at: every check tries the real thing, and says what to do where it fails."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moeclipse.cli import checks
from moeclipse.cli.checks import Finding
from moeclipse.comm.shared import links as checks_links


def by_name(items: Iterable[Finding]) -> dict[str, Finding]:
    return {item.name: item for item in items}


def test_two_ranks_really_reduce() -> None:
    yes, text = checks.try_gloo()
    assert yes, text
    assert text.startswith("two ranks met over loopback and all-reduced, in ")


def test_gloo_failures_are_reported_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "torch.distributed.init_process_group", lambda *a, **k: (_ for _ in ()).throw(OSError("nix"))
    )
    assert checks.try_gloo() == (False, "nix")


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


def test_gloo_that_does_not_answer_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "try_gloo", lambda: (False, "no answer in 30 s"))
    item = by_name(checks.backends())["gloo"]
    assert (item.state, item.value) == ("broken", "no answer in 30 s")


@pytest.mark.parametrize(
    ("driver", "cuda", "state", "advice"),
    [
        (False, None, "info", "training runs on CPU"),
        (True, None, "limited", "install torch for CUDA to use the GPU"),
        (True, "13.0", "limited", "check nvidia-smi and CUDA_VISIBLE_DEVICES"),
        (False, "13.0", "info", "no NVIDIA driver; CPU is used"),
    ],
)
def test_without_a_device(
    monkeypatch: pytest.MonkeyPatch, driver: bool, cuda: str | None, state: str, advice: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(Path, "exists", lambda path: driver)
    (item,) = checks.devices()
    assert (item.name, item.state, item.advice) == ("cuda", state, advice)


def test_devices_and_what_is_weak_about_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made up: a device without fast bfloat16, and a pair that cannot read each other's memory."""
    kinds = [("H200", 9), ("V100", 7), ("H200", 9)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(kinds))
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda i: SimpleNamespace(
            name=kinds[i][0], total_memory=141 * 2**30, major=kinds[i][1], minor=0, uuid=f"gpu-{i}"
        ),
    )
    monkeypatch.setattr(checks_links, "nvlinks_between_devices", lambda: ((0, 0, 0),) * 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: (a, b) != (0, 1))
    found = by_name(checks.devices())
    assert (found["cuda:0"].state, found["cuda:0"].value) == ("works", "H200, 141 GiB, capability 9.0")
    assert found["cuda:1"].state == "limited"
    assert "use --model.dtype float16" in found["cuda:1"].advice
    assert (found["peer access"].state, found["peer access"].value) == ("limited", "not between 0-1")


def test_a_small_machine_is_limited_not_broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(checks, "usable_cores", lambda: 1)
    monkeypatch.setattr(checks, "available_memory", lambda: 2**30)
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))
    found = by_name(checks.machine(str(tmp_path / "not" / "yet")))
    assert [found[name].state for name in ("cores", "memory", "/dev/shm", "disk")] == ["limited"] * 4
    assert all(item.advice for item in found.values())


def test_without_shared_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(path: object) -> SimpleNamespace:
        if path == "/dev/shm":
            raise FileNotFoundError(path)
        return SimpleNamespace(free=2**40)

    monkeypatch.setattr(checks.shutil, "disk_usage", missing)
    found = by_name(checks.machine(str(tmp_path)))
    assert (found["/dev/shm"].state, found["/dev/shm"].value) == ("limited", "missing")
    assert found["disk"].state == "works"


def test_a_host_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> str:
        raise OSError(name)

    monkeypatch.setattr(checks.socket, "gethostbyname", unknown)
    monkeypatch.setattr(checks, "try_namespace", lambda: "not root")
    found = by_name(checks.network())
    assert found["host name"].value.endswith(" is unknown")
    assert (found["namespaces"].state, found["namespaces"].value) == ("info", "not root")
