"""Tensors in peer memory: they do not overlap, and their memory comes back with their last view."""

from __future__ import annotations

import gc

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeclipse.comm.shared.arena import ALIGN, Arena


def arena_of(num_bytes: int, offset: int = 4096) -> tuple[Arena, torch.Tensor]:
    memory = torch.zeros(num_bytes, dtype=torch.uint8)
    return Arena(memory, offset), memory


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.integers(1, 600), st.integers(0, 3)), max_size=40))
def test_what_is_taken_does_not_overlap(steps: list[tuple[int, int]]) -> None:
    arena, _ = arena_of(2048)
    held: list[tuple[torch.Tensor, int]] = []
    for count, drop in steps:
        taken = arena.take((count,), torch.uint8)
        if taken is not None:
            taken[0].fill_(len(held) % 250 + 1)
            held.append((taken[0], len(held) % 250 + 1))
        for _ in range(min(drop, len(held))):
            held.pop(0)
        assert all((tensor == value).all() for tensor, value in held)


def test_memory_comes_back_with_the_last_view() -> None:
    arena, memory = arena_of(1000)
    taken = arena.take((10, 20), torch.float32)
    assert taken is not None
    tensor, place = taken
    assert place == 4096
    assert tensor.data_ptr() == memory.data_ptr()
    assert arena.place_of(tensor[1:]) == 4096 + 80
    assert arena.place_of(torch.ones(3)) is None
    assert arena.take((10, 20), torch.float32) is None, "no room"
    view = tensor[3:].t()
    del tensor, taken
    assert arena.take((10, 20), torch.float32) is None, "a view holds it"
    del view
    gc.collect()
    again = arena.take((200,), torch.float32)
    assert again is not None
    assert again[1] == 4096


def test_places_begin_on_cache_lines_and_gaps_are_filled() -> None:
    arena, _ = arena_of(10 * ALIGN, 0)
    first, second = (arena.take((ALIGN + 1,), torch.uint8) for _ in range(2))
    assert first is not None
    assert second is not None
    assert second[1] == 2 * ALIGN
    del first
    third = arena.take((3 * ALIGN,), torch.uint8)
    assert third is not None
    assert third[1] == 4 * ALIGN, "the gap is too small"
    fourth = arena.take((2 * ALIGN,), torch.uint8)
    assert fourth is not None
    assert fourth[1] == 0
    assert arena.take((0,), torch.uint8) is None, "nothing needs no memory"
