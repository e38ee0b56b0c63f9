"""Shared by all tests: one torch thread (ranks are forked), poisoned memory, and what machines cannot do."""

from __future__ import annotations

import os
import time
from datetime import date

import pytest
import torch
from hypothesis import settings

from moeclipse.comm.shared.fence import unordered_reason

BEGUN = time.monotonic()
# Whether there is a GPU is asked through NVML: CUDA itself, once asked, spoils all ranks forked later.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
torch.set_num_threads(1)
# torch.empty returns NaN (largest value for integers), so whoever reads what nobody wrote is found out.
torch.use_deterministic_algorithms(True)
torch.utils.deterministic.fill_uninitialized_memory = True
# A slow example says that the machine is busy, not that the code is wrong.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--within",
        type=float,
        metavar="SECONDS",
        help="skip tests that would begin later; each day begins at another one, so that all have their turn",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--within") is not None and items:
        first = 997 * date.today().toordinal() % len(items)
        items[:] = items[first:] + items[:first]


def pytest_runtest_setup(item: pytest.Item) -> None:
    within = item.config.getoption("--within")
    if within is not None and time.monotonic() - BEGUN > within:
        pytest.skip(f"the {within:g} s of --within are over")
    if within is not None and item.get_closest_marker("long"):
        pytest.skip("takes minutes by itself; run it without --within")
    if item.get_closest_marker("peer_memory") and (reason := unordered_reason()):
        pytest.skip(reason)
