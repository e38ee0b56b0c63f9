"""Which architecture a device is taken for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from moeclipse.ops.architecture import ARCHITECTURES, KIB, architecture_of, resembling


@pytest.mark.parametrize(
    ("major", "kib", "name"),
    [(8, 163, "sm_80"), (8, 99, "sm_86"), (9, 227, "sm_90"), (10, 227, "sm_100"), (12, 99, "sm_120")],
)
def test_a_device_resembles_its_generation(major: int, kib: int, name: str) -> None:
    found = resembling(major, kib * KIB)
    assert found is not None
    assert found.name == name


def test_what_is_not_named_takes_pointers_or_nothing() -> None:
    assert resembling(11, 227 * KIB) == ARCHITECTURES["sm_86"]
    assert resembling(9, 99 * KIB) == ARCHITECTURES["sm_86"], "no room for Hopper's tiles"
    assert resembling(7, 96 * KIB) is None
    assert resembling(8, 48 * KIB) is None


def test_devices_are_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    assert architecture_of(torch.device("cpu")) is None
    found = SimpleNamespace(major=8, minor=9, shared_memory_per_block_optin=99 * KIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    monkeypatch.setattr(torch.version, "hip", None)
    assert architecture_of(torch.device("cuda", 90)) == ARCHITECTURES["sm_86"]
    silent = SimpleNamespace(major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: silent)
    assert architecture_of(torch.device("cuda", 91)) == ARCHITECTURES["sm_90"], "not every torch tells"
    assert architecture_of(torch.device("cuda", 90)) == ARCHITECTURES["sm_86"]


def test_of_amd_only_what_was_compiled_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.version, "hip", "7.0")
    for number, (name, serves) in enumerate((("gfx942:sramecc+:xnack-", True), ("gfx1100", False))):
        found = SimpleNamespace(major=9, gcnArchName=name)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, found=found: found)
        assert (architecture_of(torch.device("cuda", 60 + number)) is not None) is serves
