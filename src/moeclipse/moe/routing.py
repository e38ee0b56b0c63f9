"""What a gate says: which experts each token visits, and how much it listens to each.

Experts are logical numbers; -1 marks an unused place, so a gate may give each token another number of
experts. `load_E` counts what the gate wanted, before anything was dropped.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Routing:
    expert_ids_TK: torch.Tensor
    scores_TK: torch.Tensor
    load_E: torch.Tensor
    probs_TE: torch.Tensor
    """Gate probabilities of all experts, for the balance loss."""
    logits_TE: torch.Tensor
    capacity: int = 0
    """Most rows that an expert takes; 0: no bound."""

    @property
    def num_dropped(self) -> torch.Tensor:
        """Rows wanted but not routed."""
        return self.load_E.sum() - (self.expert_ids_TK >= 0).sum()
