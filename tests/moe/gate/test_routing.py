"""What a gate says: places that are not used, and rows that were wanted but not routed."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
import torch

from moeclipse.moe.gate.routing import Routing


def test_dropped_are_the_rows_that_were_wanted_and_have_no_place() -> None:
    ids = torch.tensor([[0, 2], [1, -1], [-1, -1]])
    given = {"scores_TK": torch.ones(3, 2), "probs_TE": torch.ones(3, 3), "logits_TE": torch.ones(3, 3)}
    assert Routing(expert_ids_TK=ids, load_E=torch.tensor([1, 1, 1]), **given).num_dropped == 0
    full = Routing(expert_ids_TK=ids, load_E=torch.tensor([1, 4, 1]), capacity=1, **given)
    assert full.num_dropped == 3
    with pytest.raises(FrozenInstanceError):
        full.capacity = 0  # type: ignore[misc]
