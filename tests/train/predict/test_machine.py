"""The machine at hand as a cluster file: fits find what was drawn, and the file is read as it was written."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from moeclipse.cost.cluster import cluster, cluster_at
from moeclipse.cost.kernels import Kernels
from moeclipse.train.predict import machine
from moeclipse.train.predict.machine import MachineClock, as_toml, line, measured_launch, measured_machine


def test_rates_are_a_line_in_their_inner_dimension() -> None:
    inner = (64.0, 128.0, 512.0, 4096.0)
    peak, ends = line(inner, [700.0 * k / (k + 50.0) for k in inner])
    assert (peak, ends) == (pytest.approx(700.0), pytest.approx(50.0))
    assert line((64.0, 128.0), (9.0, 2.0))[0] == 9.0, "noise is no peak"
    assert line((64.0, 128.0), (5.0, 5.0)) == (pytest.approx(5.0), 1.0)


def test_medians_leave_out_the_first_and_the_slow() -> None:
    spent = iter((0.05, 0.0, 0.0, 0.05, 0.0, 0.0))
    assert MachineClock(torch.device("cpu"), repeats=5)(lambda: time.sleep(next(spent))) < 0.02


def test_this_machine_becomes_a_file_that_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "REPEATS", 2)
    monkeypatch.setitem(machine.COPIED, "cpu", 1 << 20)
    cpu = torch.device("cpu")
    tables = measured_machine(cpu, wire=(3e9, 2e-5))
    file = tmp_path / "costs.toml"
    file.write_text(as_toml(tables, "measured here"))
    found = cluster_at(str(file))
    assert found.device.flops == pytest.approx(tables["measured"]["flops"], rel=1e-4)
    assert found.constants.grouped == pytest.approx(tables["kernels"]["grouped"], rel=1e-4)
    assert (found.near.bandwidth, found.far.latency) == (3e9, 2e-5)
    assert found.constants.tile_m == 1, "what is not measured is that of the device"
    assert found.device.memory > 1e8
    a = torch.ones(256, 256)
    real = MachineClock(cpu)(lambda: a @ a)
    predicted = Kernels(device=found.device, constants=found.constants).product(256, 256, 256, "fp32")
    assert 0.1 < predicted / real < 10, "of the right size, on a machine that others use"
    assert measured_launch(cpu, MachineClock(cpu))[1] < 1e-3


def test_constants_of_a_file_count(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('device = "h200"\n[kernels]\ngrouped = 0.425\n')
    slow, usual = cluster_at(str(file)), cluster("h200")
    both = [Kernels(device=one.device, constants=one.constants) for one in (slow, usual)]
    ratio = both[0].grouped(65536, 32, 4096, 4096) / both[1].grouped(65536, 32, 4096, 4096)
    assert ratio == pytest.approx(2.0, rel=0.01)
