"""Devices and links: where their numbers come from, and what this machine does."""

from __future__ import annotations

import pytest

from moeclipse.core.errors import ConfigError
from moeclipse.cost.hardware import DEVICES, LINKS, device, link


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


def test_a_link_reaches_a_part_of_its_peak() -> None:
    assert link("pcie5").seconds(63e9, messages=2) == pytest.approx(2 * 3e-6 + 1 / 0.45)
