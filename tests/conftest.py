"""Shared by all tests: one torch thread (ranks are forked) and poisoned uninitialised memory."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
# torch.empty returns NaN (largest value for integers), so whoever reads what nobody wrote is found out.
torch.use_deterministic_algorithms(True)
torch.utils.deterministic.fill_uninitialized_memory = True
