"""Benches with a form for a device start there, in their smallest size (`--smoke`)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from test_benches import FIGURES, missing, smoke

# Counted through NVML: asking CUDA itself here would spoil forked ranks.
HAS_GPU = torch.cuda.device_count() > 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")]
HAS_NCCL = HAS_GPU and dist.is_nccl_available()
ON_DEVICE = ("--device", "cuda")
ALONE: dict[str, tuple[str, ...]] = {
    "hf_experts": (),
    "integrity_cost": (),
    "lora": ("--ways", "ours qv", "ours experts"),
    "moe_layer": (),
    "moe_train": (),
    "optim_states": ON_DEVICE,
    "saving": (),
    "wgrad": (),
    "whole_step": (),
}
SHARED: dict[str, tuple[str, ...]] = {
    "all_reduce": ON_DEVICE,
    "fb_overlap": ON_DEVICE,
    "overlap": (*ON_DEVICE, "--transport", "pinned"),
}
OVER_NCCL: dict[str, tuple[str, ...]] = {
    "fb_overlap": (*ON_DEVICE, "--backend", "nccl"),
    "first_run": ON_DEVICE,
    "host_time": (),
    "overlap": (*ON_DEVICE, "--backend", "nccl"),
}
OF_A_DEVICE = {
    "all_reduce": ("given", "shared", "torch one", "given, graph"),
    "overlap": ("compute", "communication", "blocking", "chosen", "in units", "neither"),
}
"""Figures that differ from those on the CPU."""


def runs(name: str, folder: Path, *words: str) -> None:
    done, found = smoke(name, folder, *words)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert not missing(found, OF_A_DEVICE.get(name, FIGURES[name])), found


@pytest.mark.full
@pytest.mark.parametrize("name", ALONE)
def test_a_bench_runs_on_a_device(name: str, tmp_path: Path) -> None:
    runs(name, tmp_path, *ALONE[name])


@pytest.mark.full
@pytest.mark.usefixtures("mps")
@pytest.mark.parametrize("name", SHARED)
def test_a_bench_runs_on_ranks_that_share_a_device(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    runs(name, tmp_path, *SHARED[name])


@pytest.mark.full
@pytest.mark.nccl
@pytest.mark.skipif(not HAS_NCCL, reason="needs NCCL")
@pytest.mark.usefixtures("mps")
@pytest.mark.parametrize("name", OVER_NCCL)
def test_a_bench_runs_over_nccl(name: str, tmp_path: Path) -> None:
    runs(name, tmp_path, *OVER_NCCL[name])
