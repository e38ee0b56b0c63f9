"""Devices and links: where their numbers come from, and what this machine does."""

from __future__ import annotations

import pytest

from moeclipse.core.errors import ConfigError
from moeclipse.cost import hardware
from moeclipse.cost.hardware import DEVICES, LINKS, device, link, measure_cpu, measure_loopback


def test_every_constant_carries_its_source() -> None:
    assert {"h100", "h200", "b200", "cpu"} <= set(DEVICES)
    assert {"nvlink4", "nvlink5", "infiniband", "pcie5", "loopback"} <= set(LINKS)
    for entry in (*DEVICES.values(), *LINKS.values()):
        assert len(entry.source) > 20
        assert 0 < entry.efficiency <= 1
    with pytest.raises(ConfigError, match="did you mean 'h100'"):
        device("h10")
    with pytest.raises(ConfigError, match="choose one of nvlink4"):
        link("carrier pigeon")


def test_this_machine_can_be_measured() -> None:
    cpu = measure_cpu(size=128, repeats=2)
    assert 0 < cpu.flops < 1e14
    assert 0 < cpu.memory_bandwidth < 1e13
    assert "measured" in cpu.source
    wire = measure_loopback(num_bytes=1 << 20, repeats=2)
    assert wire.bandwidth > 0
    assert wire.latency > 0


def test_a_link_reaches_a_part_of_its_peak() -> None:
    assert link("pcie5").seconds(63e9, messages=2) == pytest.approx(2 * 3e-6 + 1 / 0.45)


def test_a_copy_reads_and_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_timed", lambda work: 0.5)
    cpu = measure_cpu(size=8, repeats=1)
    assert cpu.flops == 2 * 8**3 / 0.5
    assert cpu.memory_bandwidth == 2 * (4 << 22) / 0.5
