"""Attention against its definition, gradients included, and who sees whom."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from apart import apart
from moeclipse.ops import attention, flex
from moeclipse.ops.attention import (
    attend,
    attend_at,
    attend_reference,
    restarting_positions,
    runs_of,
    seen_keys,
)
from moeclipse.testing.compare import difference

CPU = torch.device("cpu")
DOCUMENTS = torch.tensor([[3, 3, 3, 7, 7, 3, 3], [1, 1, 2, 2, 2, 2, 2]])
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.9},
    "window": {"window": 3},
    "wide window": {"window": 50},
    "window of one": {"window": 1},
    "softcap": {"softcap": 1.5},
    "documents": {"documents_BS": DOCUMENTS},
    "all": {"scale": 0.9, "window": 3, "softcap": 1.5, "documents_BS": DOCUMENTS},
}


def inputs(queries: int = 7, keys: int = 7) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, queries, 6), (2, 2, keys, 6), (2, 2, keys, 5), (4,)]
    return [torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in shapes]


def by_hand(q: Any, k: Any, v: Any, sinks: Any, options: dict[str, Any]) -> torch.Tensor:
    """Query by query and key by key."""
    out = torch.zeros(2, 4, q.shape[2], v.shape[3], dtype=torch.float64)
    before = k.shape[2] - q.shape[2]
    cap, documents = options.get("softcap", 0), options.get("documents_BS")
    for b in range(2):
        for h in range(4):
            for i in range(q.shape[2]):
                terms, total = [], torch.zeros((), dtype=torch.float64)
                for j in range(i + before + 1):
                    far = options.get("window", 0) and i + before - j >= options["window"]
                    split = documents is not None and (documents[b, j : i + 1] != documents[b, i]).any()
                    if far or split:
                        continue
                    score = q[b, h, i] @ k[b, h // 2, j] * options.get("scale", 6**-0.5)
                    weight = (cap * torch.tanh(score / cap) if cap else score).exp()
                    terms.append(weight * v[b, h // 2, j])
                    total = total + weight
                total = total if sinks is None else total + sinks[h].exp()
                out[b, h, i] = torch.stack(terms).sum(0) / total
    return out


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("name", CASES)
@apart
def test_attention_by_hand(name: str, sinks: bool) -> None:
    q, k, v, logits = inputs()
    options, given = CASES[name], logits if sinks else None
    wanted = [q, k, v, logits] if sinks else [q, k, v]
    probe = torch.randn(2, 4, 7, 5, dtype=torch.float64)
    expected = by_hand(q, k, v, given, options)
    slow = torch.autograd.grad((expected * probe).sum(), wanted)
    for function in (attend, attend_reference):
        found = function(q, k, v, sinks_H=given, **options)
        assert difference(found, expected) < 1e-13
        for a, b in zip(torch.autograd.grad((found * probe).sum(), wanted), slow, strict=True):
            assert (a - b).abs().max() < 1e-12 * max(1, b.abs().max())  # a query that sees one key has none


@apart
def test_keys_before_the_first_query_are_seen_by_all() -> None:
    q, k, v, sinks = inputs(queries=3, keys=5)
    for options in ({}, {"window": 2}, {"sinks_H": sinks}):
        given = {key: value for key, value in options.items() if key != "sinks_H"}
        expected = by_hand(q, k, v, options.get("sinks_H"), given)
        assert difference(attend(q, k, v, **options), expected) < 1e-13


@apart
def test_no_samples_and_one_token() -> None:
    q, k, v, sinks = inputs()
    for options in ({}, {"window": 2, "sinks_H": sinks}, {"documents_BS": DOCUMENTS[:0]}):
        assert attend(q[:0], k[:0], v[:0], **options).shape == (0, 4, 7, 5)
    one = attend(q[:, :, :1], k[:, :, :1], v[:, :, :1], window=1)
    assert difference(one, v[:, :, :1].repeat_interleave(2, dim=1)) < 1e-15


def test_low_precision_is_close_to_the_definition() -> None:
    q, k, v, sinks = (tensor.detach().bfloat16() for tensor in inputs())
    for options in CASES.values():
        found = attend(q, k, v, sinks_H=sinks, **options)
        exact = attend_reference(q.double(), k.double(), v.double(), sinks_H=sinks.double(), **options)
        assert found.dtype == torch.bfloat16
        assert difference(found, exact) < 2**-7


def test_documents_are_runs_of_equal_numbers() -> None:
    assert restarting_positions(DOCUMENTS).tolist() == [[0, 1, 2, 0, 1, 0, 1], [0, 1, 0, 1, 2, 3, 4]]
    assert runs_of(DOCUMENTS).tolist() == [[0, 0, 0, 1, 1, 2, 2], [0, 0, 1, 1, 1, 1, 1]]
    assert restarting_positions(torch.zeros(1, 3)).tolist() == [[0, 1, 2]]


def test_who_sees_whom() -> None:
    assert seen_keys(2, 3, 0, None, CPU).int().tolist() == [[1, 1, 0], [1, 1, 1]]
    assert seen_keys(3, 3, 2, None, CPU).int().tolist() == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]


def test_plain_attention_is_one_call_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask, or all scores, would take memory of the square of the length."""
    calls: list[dict[str, Any]] = []

    def note(q: Any, k: Any, v: Any, **options: Any) -> torch.Tensor:
        calls.append(options)
        return q

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", note)
    q, k, v, _ = inputs()
    attend(q, k, v, window=7)
    assert calls[0]["attn_mask"] is None
    assert calls[0]["is_causal"]


@pytest.mark.parametrize("name", ["window", "softcap", "documents", "all"])
@apart
def test_what_devices_compute_is_the_definition(name: str) -> None:
    """Flex attention without its compiler, forward alone; all of it: `tests/gpu/test_attention_on_gpu.py`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex.known(), "runner", lambda _family, _shape: flex.plain)
        q, k, v, sinks = (tensor.detach().float() for tensor in inputs())
        given = {"scale": None, "window": 0, "softcap": 0.0, "documents_BS": None, **CASES[name]}
        for used in (None, sinks):
            found = attention.attend_flex(q, k, v, sinks_H=used, **given)
            assert difference(found, attend_reference(q, k, v, sinks_H=used, **given)) < 1e-5


def test_queries_may_stand_anywhere_among_the_keys() -> None:
    """Row by row against the definition, which knows queries behind all keys alone."""
    generator = torch.Generator().manual_seed(4)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k, v, sinks = random(3, 4, 2, 6), random(3, 2, 9, 6), random(3, 2, 9, 5), random(4)
    place_BS = torch.tensor([[3, 4], [7, 8], [0, 1]])
    for given in ({}, {"softcap": 1.5}, {"sinks_H": sinks}, {"softcap": 1.5, "sinks_H": sinks, "scale": 0.4}):
        for window in (0, 3):
            first_BS = place_BS - window + 1 if window else None
            found = attend_at(q, k, v, place_BS, first_BS=first_BS, **given)
            for row, (_, last) in enumerate(place_BS.tolist()):
                keys = slice(0, last + 1)
                wanted = attend_reference(
                    q[row, None], k[row, None, :, keys], v[row, None, :, keys], window=window, **given
                )
                assert difference(found[row], wanted[0]) < 1e-13
    assert attend_at(q[:0], k[:0], v[:0], place_BS[:0]).shape == (0, 4, 2, 5)


def test_a_window_shorter_than_the_keys_is_one_though_queries_are_few() -> None:
    """As with memory, or where a text goes on: two queries see three keys each, and not all six."""
    q, k, v = (torch.randn(1, 2, length, 4, dtype=torch.float64) for length in (2, 6, 6))
    found = attend(q, k, v, window=3)
    assert difference(found, attend_reference(q, k, v, window=3)) < 1e-12
    assert difference(found, attend(q, k, v)) > 1e-3
