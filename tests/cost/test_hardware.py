"""Devices and links: where their numbers come from, and what this machine does."""

from __future__ import annotations

import pytest

from moeclipse.core.errors import ConfigError
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
