"""Shared by all tests: one torch thread (ranks are forked), poisoned memory, and what machines cannot do."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings

from moeclipse.comm.fence import unordered_reason

torch.set_num_threads(1)
# torch.empty returns NaN (largest value for integers), so whoever reads what nobody wrote is found out.
torch.use_deterministic_algorithms(True)
torch.utils.deterministic.fill_uninitialized_memory = True
# A slow example says that the machine is busy, not that the code is wrong.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("peer_memory") and (reason := unordered_reason()):
        pytest.skip(reason)
