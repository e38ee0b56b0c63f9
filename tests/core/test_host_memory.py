"""What a host has left: the kernel's estimate, or what a container may still take."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeclipse.core import host_memory
from moeclipse.core.host_memory import available_memory

INFO = "MemTotal:  9000 kB\nMemAvailable:  4000 kB\n"


def test_this_host_has_some() -> None:
    assert 0 < available_memory() < 2**50


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (None, 4000 * 1024),
        ("max", 4000 * 1024),
        ("3000000", 2_000_000),
        ("9000000000", 4000 * 1024),
        ("10", 0),
    ],
)
def test_the_container_may_have_less(
    limit: str | None, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "meminfo"
    info.write_text(INFO)
    if limit is not None:
        (tmp_path / "memory.max").write_text(limit)
        (tmp_path / "memory.current").write_text("1000000")
    monkeypatch.setattr(host_memory, "INFO", info)
    monkeypatch.setattr(host_memory, "GROUP", tmp_path)
    assert available_memory() == expected


def test_what_is_not_known_is_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "INFO", tmp_path / "missing")
    monkeypatch.setattr(host_memory, "GROUP", tmp_path)
    assert available_memory() == 0
