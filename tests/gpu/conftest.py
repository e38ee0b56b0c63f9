"""Ranks of one GPU run side by side under MPS, where it is installed; else they take turns."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="module")
def mps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None or not torch.cuda.device_count():
        yield
        return
    folder = str(tmp_path_factory.mktemp("mps"))
    settings = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
    os.environ |= settings
    subprocess.run([control, "-d"], check=True)
    yield
    # "quit" waits for clients, and compilers' workers of this process may be some: it then ends behind them
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run([control], input="quit\n", text=True, check=True, timeout=10)
    for name in settings:
        del os.environ[name]
