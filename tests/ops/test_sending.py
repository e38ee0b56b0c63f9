"""Who sends what to whom: against loops over tokens."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from interpreted import assert_exchange_ran

from moeclipse.core.shares import even_bounds
from moeclipse.ops.sending import (
    Places,
    chunk_of,
    pairs_to_send_reference,
    rows_to_send_reference,
)

RANK_OF_SLOT = [0, 0, 1, 1, 1, 2]
PLACES = Places(
    rank_of_slot=torch.tensor(RANK_OF_SLOT), first_slot_P1=torch.tensor([0, 2, 5, 6]), num_slots=6
)
TOKENS = st.lists(st.permutations(range(-1, 6)).map(lambda slots: slots[:3]), max_size=9)


@given(TOKENS, st.integers(1, 3))
def test_rows_and_pairs_stand_in_their_order(tokens: list[list[int]], chunks: int) -> None:
    slots_TK = torch.tensor(tokens, dtype=torch.int64).view(-1, 3)
    rows = rows_to_send_reference(slots_TK, PLACES)
    ranks = [[RANK_OF_SLOT[slot] if slot >= 0 else -1 for slot in token] for token in tokens]
    expected = [(p, t) for p in range(3) for t, token in enumerate(ranks) if p in token]
    assert rows.rows_P.tolist() == [sum(p == q for q, _ in expected) for p in range(3)]
    assert rows.row_token_M[: len(expected)].tolist() == [t for _, t in expected]
    cuts = [chunks, 1, chunks]
    found = pairs_to_send_reference(slots_TK, rows, PLACES, torch.tensor(cuts), chunks)
    keyed = []
    for t, token in enumerate(tokens):
        for k, slot in enumerate(token):
            if slot < 0:
                continue
            p = ranks[t][k]
            row = [u for q, u in expected if q == p].index(t)
            bounds = even_bounds(sum(q == p for q, _ in expected), cuts[p])
            chunk = next(c for c in range(cuts[p]) if bounds[c] <= row < bounds[c + 1])
            before = sum(other < slot for other, q in zip(token, ranks[t], strict=True) if q == p)
            assert rows.address_TK[t, k] == row * 3 + before
            keyed.append((p, chunk, slot, t, k))
            first = rows.token_row_TK[t, ranks[t].index(p)]
            assert expected[int(first)] == (p, t)
    places = [t * 3 + k for *_, t, k in sorted(keyed)]
    assert found.pair_place_M[: len(places)].tolist() == places
    assert [int(found.place_pair_TK.flatten()[place]) for place in places] == list(range(len(places)))
    assert int(found.pairs_S.sum()) == len(places)


@given(st.integers(0, 30), st.integers(1, 7))
def test_chunks_are_cut_alike_on_both_sides(total: int, chunks: int) -> None:
    bounds = even_bounds(total, chunks)
    place = torch.arange(total)
    found = chunk_of(place, torch.full_like(place, total), torch.full_like(place, chunks)).tolist()
    expected = [next(c for c in range(chunks) if bounds[c] <= i < bounds[c + 1]) for i in range(total)]
    assert found == expected


def test_kernels_make_the_same_tables() -> None:
    assert_exchange_ran(kind="sending")
