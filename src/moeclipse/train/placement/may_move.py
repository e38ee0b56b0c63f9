"""Whether experts move and are lent, where a run leaves that to us.

`placement.planner` and `moe.shadow` = "auto" are wishes, not orders. Where something speaks against one (a
rank has all experts, a table says who holds what, rows that tokens share would be torn apart, or a rule
refuses every planner), experts stay, or are not lent, and the run says why. A planner or shadows that are
named are taken at their word, and refused before the run starts where that cannot be done.

Contract. A pure function of the configuration and the number of ranks that share a layer's experts, so all
ranks decide alike, and a resumed run decides again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moeclipse.balance.objective import rows_per_pair
from moeclipse.core.config import problems_of, with_values
from moeclipse.train.config import TrainConfig

MOVES = {"placement.planner": "incremental"}
LENDS = {"moe.shadow": (0,)}
"""What auto may do, by names that rules refuse where it cannot be done."""
LEAST_SAVED = 0.25
"""Rows that a pair must save by staying: lent alone, an expert leaves the others' rows on the wire."""


def as_far_as_it_goes(config: TrainConfig, expert_ranks: int) -> tuple[TrainConfig, list[str]]:
    """The configuration with what cannot be had switched off, and a line that says what experts do."""
    if not config.num_expert_layers:
        return config, []
    changes: dict[str, Any] = {}
    told = []
    if config.placement.at_ease:
        why = why_experts_stay(config, expert_ranks)
        changes |= {"placement.planner": "static"} if why is not None else {}
        told.append(("move", why))
    if config.moe.shadow == "auto":
        why = why_nothing_is_lent(config, expert_ranks)
        changes |= {"moe.shadow": "off"} if why is not None else {}
        told.append(("are lent", why))
    return with_values(config, changes), in_words(told) if expert_ranks > 1 else []


def why_experts_stay(config: TrainConfig, expert_ranks: int) -> str | None:
    """None where they may move; empty where there is nowhere to go."""
    if expert_ranks == 1:
        return ""
    if config.placement.slots:
        return "placement.slots says who holds what; name a planner to go on from there"
    if config.placement.reduce == "fedavg":
        return "placement.reduce = 'fedavg' would train another model with each placement"
    if 1 < config.gate.num_groups != config.gate.top_groups:
        return f"gate.num_groups ({config.gate.num_groups}): experts of a group, chosen together, share rows"
    why = refused(config, MOVES)
    return None if why is None else why.replace(repr(MOVES["placement.planner"]), "'auto'")


def why_nothing_is_lent(config: TrainConfig, expert_ranks: int) -> str | None:
    if expert_ranks == 1:
        return ""
    together = rows_per_pair(config.gate.expected_experts, expert_ranks) < LEAST_SAVED
    if together:
        return (
            f"gate.top_k ({config.gate.top_k}) on {expert_ranks} ranks: a row serves several experts of one"
        )
    if refused(config, LENDS) is None:
        return None
    if config.model.base:
        return f"model.base ({config.model.base!r}): experts in few bits are not lent"
    return "placement.reduce = 'fedavg' counts rows where their expert lives"


def refused(config: TrainConfig, named: Mapping[str, object]) -> str | None:
    """What rules say against these values; None where they take them."""
    known = set(problems_of(config))
    return next((text for text in problems_of(with_values(config, named)) if text not in known), None)


def in_words(told: list[tuple[str, str | None]]) -> list[str]:
    """experts: move where that pays, are lent where that pays"""
    parts = [f"{what} where that pays" if why is None else f"never {what} ({why})" for what, why in told]
    return [f"experts: {', '.join(parts)}"] if parts else []
