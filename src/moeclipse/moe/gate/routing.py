"""What a gate says: which experts each token visits, and the gate weight of each.

Experts are logical numbers; -1 marks an unused place, so a gate may give each token another number of
experts. `load_E` counts what the gate wanted, before anything was dropped.

Order of equal numbers:

    of a token    experts and groups are compared with all bits; of equal ones the lower number comes first
    of several    scores are compared with half of their bits; equal ones go by token, then by choice

Equal tokens have equal scores but for the last bits. These depend on the order of sums, so on the schedule
of an exchange, which must not change the model: it must not decide which token is dropped. Experts of one
token are compared within one product; half of its bits would choose others than the weights were trained
with wherever two experts are close.

Planners have the rule of several for averages (`balance/problem`); shadows count whole rows, which tie
exactly. Hazard: `torch.topk` does not say which of two equal ones it takes, and kernels take another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, is_dataclass, replace
from functools import cache

import torch

from moeclipse.ops.sending import Sending


@dataclass(frozen=True, kw_only=True)
class GateSums:
    """What losses need of a gate's probabilities and logits."""

    prob_E: torch.Tensor
    squares: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Routing:
    expert_ids_TK: torch.Tensor
    scores_TK: torch.Tensor
    load_E: torch.Tensor
    probs_TE: torch.Tensor | None = None
    """Gate probabilities of all experts; None where only their sums are known."""
    logits_TE: torch.Tensor | None = None
    sums: GateSums | None = None
    capacity: int = 0
    """Most rows that an expert takes; 0: no bound."""
    complete: bool = False
    """Every token goes to all experts that it wanted: nothing has to be counted to know."""
    sending: Sending | None = None
    """Who sends what to whom, where that was found already."""

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that it holds, in one order."""
        return tuple(_tensors_of(self))

    def filled(self, tensors: Sequence[torch.Tensor]) -> Routing:
        """The same with other tensors, in that order."""
        filled = _filled(self, iter(tensors))
        assert isinstance(filled, Routing)
        return filled

    @property
    def num_dropped(self) -> torch.Tensor:
        """Rows wanted but not routed."""
        if self.complete:
            return no_rows(self.load_E.device)
        return self.load_E.sum() - (self.expert_ids_TK >= 0).sum()

    @property
    def probabilities(self) -> torch.Tensor:
        """[E]: summed over this rank's tokens."""
        if self.sums is not None:
            return self.sums.prob_E
        assert self.probs_TE is not None
        return self.probs_TE.sum(0)

    @property
    def squares(self) -> torch.Tensor:
        """Sum over this rank's tokens of logsumexp(logits)^2."""
        if self.sums is not None:
            return self.sums.squares
        assert self.logits_TE is not None
        return self.logits_TE.logsumexp(-1).square().sum()


def _tensors_of(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif is_dataclass(value):
        for item in vars(value).values():
            yield from _tensors_of(item)


def _filled(value: object, tensors: Iterator[torch.Tensor]) -> object:
    if isinstance(value, torch.Tensor):
        return next(tensors)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    return replace(value, **{name: _filled(item, tensors) for name, item in vars(value).items()})


@cache
def no_rows(device: torch.device) -> torch.Tensor:
    """One zero for all who have nothing to tell: to make it anew is a launch. Nobody writes to it."""
    return torch.zeros((), dtype=torch.int64, device=device)


def count_experts(ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Rows for each expert; unused places do not count."""
    # Not bincount: on a GPU it asks the host how long it is to be.
    place = ids.flatten() + 1
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
    return counts.scatter_add_(0, place.long(), counts.new_ones(()).expand_as(place))[1:]


def pairs_and_rows(ids_TK: torch.Tensor, rank_of_E: torch.Tensor, num_experts: int) -> torch.Tensor:
    """[2, E]: pairs of this rank for each expert, and the rows that travel for them.

    A token's vector goes to a rank once, however many of its experts live there. The row counts for the
    least wanted of them: busy experts get shadows first, so it is saved when that one has one, too.
    """
    used_TK, known_TK = ids_TK >= 0, ids_TK.clamp(min=0)
    ranks_TK = torch.where(used_TK, rank_of_E[known_TK], -1)
    pairs_E = count_experts(ids_TK, num_experts)
    wanted_TK = pairs_E[known_TK] * num_experts - known_TK  # no two experts are wanted alike
    together_TKK = ranks_TK[:, :, None] == ranks_TK[:, None, :]
    rarer_TKK = together_TKK & (wanted_TK[:, None, :] < wanted_TK[:, :, None])
    counts_TK = used_TK & ~rarer_TKK.any(2)
    rows_E = torch.bincount(known_TK[counts_TK], minlength=num_experts)
    return torch.stack([pairs_E, rows_E])


_DROPPED = {torch.float64: (torch.int64, 26), torch.float32: (torch.int32, 12)}
"""The whole numbers of a type's size, and how many of its last bits nobody compares."""


def best_of(values_TE: torch.Tensor, k: int) -> torch.Tensor:
    """The numbers of each row's k largest, the largest first; of equal ones the first. Nobody waits."""
    return _best_by_sort(values_TE, k) if values_TE.dtype != torch.float32 else _best_by_key(values_TE, k)


def _best_by_sort(values_TE: torch.Tensor, k: int) -> torch.Tensor:
    return values_TE.sort(dim=1, descending=True, stable=True).indices[:, :k]


def _best_by_key(values_TE: torch.Tensor, k: int) -> torch.Tensor:
    """A number and its place in one whole number, so that no two are equal: sorting all takes longer."""
    values_TE = torch.where(values_TE.isnan(), torch.inf, values_TE) + 0.0  # -0.0 is 0.0
    bits_TE = values_TE.view(torch.int32).long()
    ordered_TE = torch.where(bits_TE < 0, bits_TE ^ 0x7FFFFFFF, bits_TE)
    place_E = torch.arange(values_TE.shape[1] - 1, -1, -1, device=values_TE.device)
    return (ordered_TE * 2**32 + place_E).topk(k, dim=1).indices


def half_of_bits(values: torch.Tensor) -> torch.Tensor:
    """Rounded to half of the digits that the type has; no order is turned round."""
    whole, dropped = _DROPPED[values.dtype]
    bits = values.detach().contiguous().view(whole)
    rounded: torch.Tensor = (bits + 2 ** (dropped - 1)) & -(2**dropped)
    return rounded.view(values.dtype)


def order_of(scores_TK: torch.Tensor) -> torch.Tensor:
    """The places of all scores of several tokens, [T * K]: high ones first, equal ones as they stand."""
    return half_of_bits(scores_TK).flatten().argsort(descending=True, stable=True)
