"""Which shapes are compiled for themselves; what is computed: `test_attention`, and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from moeclipse.ops import flex
from moeclipse.ops.attention_blocks import window_blocks
from moeclipse.ops.flex import SHAPES, FlexKernels, capped_at, compiled


def counting() -> tuple[FlexKernels, list[bool]]:
    made: list[bool] = []

    def make(_name: str, one_shape: bool) -> Callable[..., Any]:
        made.append(one_shape)
        number = len(made)
        return lambda: number

    return FlexKernels(make), made


def test_the_first_shapes_have_kernels_of_their_own_and_all_others_share_one() -> None:
    known, made = counting()
    first = [known.runner("a", length)() for length in range(SHAPES)]
    assert first == list(range(1, SHAPES + 1))
    assert made == [True] * SHAPES
    others = {known.runner("a", length)() for length in range(SHAPES, SHAPES + 100)}
    assert others == {SHAPES + 1}
    assert made == [True] * SHAPES + [False]
    assert [known.runner("a", length)() for length in range(SHAPES)] == first
    assert known.runner("b", 0)() == SHAPES + 2, "another family begins anew"
    assert made[-1]


def test_what_changes_a_kernel_makes_another_family(monkeypatch: pytest.MonkeyPatch) -> None:
    known, made = counting()
    seen: list[Any] = []

    def runner(family: Any, shape: Any) -> Callable[..., Any]:
        seen.append((family, shape))
        known.runner(family, shape)
        return flex.plain

    monkeypatch.setattr(flex.known(), "runner", runner)
    mask = window_blocks(8, 8, 3, torch.device("cpu"))

    def call(length: int = 8, heads: int = 2, dtype: torch.dtype = torch.float32, **given: Any) -> None:
        rows = [torch.randn(1, count, length, 4, dtype=dtype) for count in (heads, 1, 1)]
        own = window_blocks(length, length, 3, torch.device("cpu"))
        flex.flex(*rows, mask=own, **{"kind": (3, 0), **given})

    call()
    call()
    assert len(made) == 1
    call(length=16)
    assert len(made) == 2
    for changed in (
        {"heads": 4},
        {"dtype": torch.float64},
        {"softcap": 2.0},
        {"kind": (4, 0)},
        {"scale": 0.5},
    ):
        call(**changed)
    with torch.no_grad():
        call()
    families = [family for family, _ in seen]
    assert len(set(families[:3])) == 1
    assert len(set(families)) == 7
    # The same sizes laid out otherwise are another shape.
    rows = [torch.randn(1, 8, count, 4).transpose(1, 2) for count in (2, 1, 1)]
    flex.flex(*rows, mask=mask, kind=(3, 0))
    assert seen[-1][0] == families[0]
    assert seen[-1][1] != seen[0][1]


def test_each_is_a_function_of_its_own_to_dynamo() -> None:
    """One that is compiled too often runs uncompiled: variants of one must not count for another."""
    calls: list[str] = []

    def note(function: Any, *, dynamic: bool | None) -> Any:
        calls.append(function.__code__.co_name)
        assert dynamic in (False, None)
        return function

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", note)
        known = FlexKernels(compiled)
        first, second = known.runner("a", 1), known.runner("a", 2)
    assert first.__code__ is not second.__code__
    assert calls[0] != calls[1]
    q = torch.randn(1, 1, 4, 4)
    assert torch.equal(first(q, q, q), second(q, q, q))


def test_scores_are_capped_by_one_function_for_each_number() -> None:
    """Dynamo asks who a function is: another one each time would be compiled each time."""
    assert capped_at(2.0) is capped_at(2.0)
    assert capped_at(2.0)(torch.tensor(100.0), 0, 0, 0, 0).item() == pytest.approx(2.0)
