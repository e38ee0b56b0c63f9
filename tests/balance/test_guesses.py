"""Guesses are legal changes: nothing is lost, nothing stands twice, and every kind of them occurs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import FREE, asked, problems

from moeclipse.balance.draft import Draft
from moeclipse.balance.guesses import Guesses
from moeclipse.balance.placement import EMPTY, Placement
from moeclipse.balance.replicate import plan_random

KINDS = ("drops", "replications", "returns", "exchanges", "displacements")


@settings(deadline=None, max_examples=50)
@given(problems(), st.integers(0, 9), st.integers(1, 2))
def test_guesses_are_legal(problem: tuple[np.ndarray, tuple[int, ...]], seed: int, nodes: int) -> None:
    counts_PE, slots_P = problem
    current = plan_random(counts_PE.shape[1], slots_P, seed)
    node_P = tuple(rank % nodes for rank in range(len(slots_P)))
    draft = Draft.of(current, replace(asked(counts_PE, slots_P, current), node_P=node_P))
    guesses = Guesses(draft)
    for kind in KINDS:
        for change in getattr(guesses, kind)():
            after = draft.changed(change).placement()  # the record refuses lost experts and duplicates
            assert [len(row) for row in after.slots] == list(slots_P)
            assert sum(move.weights for move in current.moves(after)) <= change.moves


def test_every_kind_of_change_is_thought_of() -> None:
    current = Placement.parse([[0, 1, EMPTY], [2, 0, 3], [4, 5, EMPTY]])
    counts_PE = np.array([[9.0, 2, 1, 1, 30, 1], [90.0, 2, 1, 1, 1, 1], [9.0, 2, 1, 1, 1, 1]])
    guesses = Guesses(Draft.of(current, asked(counts_PE, (3, 3, 3), current, replace(FREE, row_bytes=1.0))))
    found = {kind: getattr(guesses, kind)() for kind in KINDS}
    assert all(found[kind] for kind in ("drops", "replications", "returns")), found
    assert {change.put for change in found["drops"]} == {EMPTY}
    assert {change.target for change in found["returns"]} == {int(np.argmax(guesses.leave_P))}
