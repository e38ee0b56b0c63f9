"""How ranks start: what the launcher told them, and what CUDA must be told before."""

from __future__ import annotations

import pytest
import torch

from moeclipse.comm.start import RankPlace, choose_device, cuda_settings, open_store, start, stop
from moeclipse.core.errors import CommError


def test_a_process_that_nobody_launched_is_alone() -> None:
    assert RankPlace.read({}) == RankPlace()
    stop()
    watch = start(RankPlace(), device=torch.device("cpu"), deadline_s=3.0)
    assert (watch.store, watch.num_ranks, watch.deadline_s) == (None, 1, 3.0)
    stop()


def test_what_the_launcher_said_is_read() -> None:
    told = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    place = RankPlace.read({**told, "TORCHELASTIC_RESTART_COUNT": "2"})
    assert place == RankPlace(rank=5, num_ranks=8, local_rank=1, local_ranks=4, attempt=2)


def test_a_rank_without_an_address_says_how_to_start_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from datetime import timedelta

    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(CommError, match="rank 1 of 2, but MASTER_ADDR and MASTER_PORT are not"):
        open_store(RankPlace(rank=1, num_ranks=2), timedelta(seconds=1))


def test_devices() -> None:
    assert choose_device("cpu") == torch.device("cpu")


def test_kernels_are_loaded_at_the_start_where_stages_wait_for_each_other() -> None:
    """A kernel that is loaded later waits for a transfer that may wait for this very host."""
    assert "CUDA_MODULE_LOADING" not in cuda_settings(pp=1)
    assert cuda_settings(pp=2)["CUDA_MODULE_LOADING"] == "EAGER"
    assert cuda_settings(pp=1)["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
