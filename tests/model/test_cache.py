"""What is kept of a text: where it is put, and who sees which part of it."""

from __future__ import annotations

from typing import Any

import torch

from moeclipse.model.cache import CacheCall, KeyValueCache


def call(
    places: list[list[int]], num_keys: int, cache: KeyValueCache | None = None, **given: Any
) -> CacheCall:
    place_BS = torch.tensor(places)
    cache = cache or KeyValueCache(6)
    given.setdefault("count_B", torch.tensor(list(map(len, places))))
    return CacheCall(cache=cache, place_BS=place_BS, num_keys=num_keys, begins=False, **given)


def test_rows_of_unequal_length_go_on_where_they_ended() -> None:
    cache = KeyValueCache(6)
    new = torch.arange(2 * 3 * 2).view(2, 1, 3, 2).double() + 1
    first = call([[0, 1, 2], [0, 1, 2]], 3, cache)  # the second row ends at 1; 2 is padding
    assert torch.equal(first.keys(4, new), new)
    more = -torch.ones(2, 1, 1, 2).double()
    kept = call([[3], [2]], 4, cache).keys(4, more)
    assert torch.equal(kept[0, 0, :, 0], torch.tensor([1.0, 3, 5, -1]).double())
    assert torch.equal(kept[1, 0, :, 0], torch.tensor([7.0, 9, -1, 0]).double()), "padding is overwritten"
    values = call([[0], [0]], 1, cache).values(4, more)
    assert torch.equal(values, more), "values have a place of their own"
    assert torch.equal(call([[0], [0]], 4, cache).keys(5, more)[:, :, 1:], torch.zeros(2, 1, 3, 2).double())
    assert torch.equal(call([[3], [2]], 4, cache).keys(4, more), kept), "layers are apart"


def test_who_sees_what() -> None:
    where = call([[5], [8]], 6, segment=4)
    assert where.first_seen(0, 0) is None
    assert where.first_seen(3, 0).tolist() == [[3], [6]]  # three places, its own included
    assert where.first_seen(0, 0, chunk=3).tolist() == [[3], [6]]  # of its piece
    assert where.first_seen(0, 2).tolist() == [[2], [6]]  # two before the segments that begin at 4 and at 8
    assert not where.plain(0)
    given = {"cache": where.cache, "place_BS": torch.arange(5)[None], "count_B": torch.tensor([5])}
    begins = CacheCall(**given, num_keys=5, begins=True, segment=4)
    assert begins.plain(0)
    assert not begins.plain(2), "longer than a segment"


def test_states_are_kept_where_they_were() -> None:
    """A graph reads the memory that it was captured with."""
    cache = KeyValueCache(6)
    assert cache.state(0, 3) is None
    cache.keep(0, 3, torch.ones(2))
    kept = cache.state(0, 3)
    cache.keep(0, 3, torch.zeros(2))
    assert kept is cache.state(0, 3)
    assert kept.tolist() == [0, 0]
    where = call([[0, 1], [4, 5]], 2, count_B=torch.tensor([1, 2]))
    assert where.is_new.tolist() == [[True, False], [True, True]]
