"""The chunked gated delta rule against its definition, gradients included."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from moeclipse.ops.delta_rule import delta_rule, delta_rule_reference, fla_kernel, states_read, unit
from moeclipse.testing.compare import difference

BEGINS = torch.zeros(2, 11, dtype=torch.bool)
BEGINS[0, [0, 4, 5]] = True
BEGINS[1, [7, 8]] = True


def inputs(by_component: bool) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    decays = (2, 11, 4, 3) if by_component else (2, 11, 4)
    found = [random(2, 11, 2, 3), random(2, 11, 2, 3), random(2, 11, 4, 5), -random(*decays).abs()]
    found += [random(2, 11, 4).sigmoid(), random(2, 4, 3, 5)]
    return [x.requires_grad_() for x in found]


def run(function: Any, by_component: bool, **given: Any) -> list[torch.Tensor]:
    """Outputs, the state, and the gradients of all inputs."""
    *rows, state = inputs(by_component)
    out, last = function(*rows, state_BHKV=state, **given)
    (out.square().sum() + (last * torch.arange(5)).sum()).backward()
    return [out, last, *(x.grad for x in (*rows, state))]


@pytest.mark.parametrize("begins", [None, BEGINS], ids=["whole", "documents"])
@pytest.mark.parametrize("by_component", [False, True])
@pytest.mark.parametrize("chunk", [1, 4, 11])
def test_chunks_give_what_tokens_give(chunk: int, by_component: bool, begins: Any) -> None:
    expected = run(delta_rule_reference, by_component, begins_BS=begins)
    found = run(delta_rule, by_component, begins_BS=begins, chunk=chunk)
    assert max(map(difference, found, expected)) < 1e-13


def test_the_state_goes_on_and_stays_where_nothing_is_written() -> None:
    q, k, v, decay, beta, _ = (x.detach() for x in inputs(False))
    whole, last = delta_rule(q, k, v, decay, beta)
    first, state = delta_rule(*(x[:, :5] for x in (q, k, v, decay, beta)))
    second, state = delta_rule(*(x[:, 5:] for x in (q, k, v, decay, beta)), state_BHKV=state)
    assert difference(torch.cat([first, second], 1), whole) < 1e-13
    assert difference(state, last) < 1e-13
    _, same = delta_rule(q, k, v, 0 * decay, 0 * beta, state_BHKV=state)
    assert same.equal(state)


def test_nothing_overflows_where_much_is_forgotten() -> None:
    """Ahead of a token the differences of decays are positive, and large."""
    q, k, v, decay, beta, _ = inputs(False)
    out, _ = delta_rule(q, k, v, decay * 1e4, beta)
    out.sum().backward()
    for x in (q, k, v, decay, beta):
        assert x.grad is not None
        assert x.grad.isfinite().all()


def test_documents_do_not_hear_of_each_other() -> None:
    q, k, v, decay, beta, _ = (x.detach() for x in inputs(False))
    whole, _ = delta_rule(q, k, v, decay, beta, begins_BS=BEGINS)
    alone, _ = delta_rule(*(x[:1, 5:] for x in (q, k, v, decay, beta)))
    assert difference(whole[:1, 5:], alone) < 1e-13


def test_narrow_types_are_computed_in_fp32_and_empty_ones_at_all() -> None:
    q, k, v, decay, beta, _ = (x.detach() for x in inputs(False))
    narrow, state = delta_rule(*(x.bfloat16() for x in (q, k, v, decay, beta)))
    assert narrow.dtype == torch.bfloat16
    assert state.dtype == torch.float32
    assert difference(narrow, delta_rule(q, k, v, decay, beta)[0]) < 0.05
    assert delta_rule(*(x[:0] for x in (q, k, v, decay, beta)))[0].shape == (0, 11, 4, 5)


def test_units_are_of_length_one() -> None:
    assert torch.allclose(unit(torch.randn(3, 5)).norm(dim=-1), torch.ones(3), atol=1e-5)


@pytest.mark.parametrize("by_component", [False, True])
def test_the_kernels_of_fla_take_what_they_are_given(by_component: bool, monkeypatch: Any) -> None:
    """Not run here: it needs a GPU. Its names of arguments are, and how documents are laid out."""
    pytest.importorskip("fla")
    kernel = fla_kernel(by_component=by_component)
    calls = []

    def called(*args: Any, **given: Any) -> Any:
        bound = inspect.signature(inspect.unwrap(kernel)).bind(*args, **given)
        calls.append(bound.arguments)
        *mine, _ = (x.detach() for x in inputs(by_component))
        return delta_rule(*mine, begins_BS=BEGINS)

    monkeypatch.setattr("moeclipse.ops.delta_rule.fla_fits", lambda _: True)
    monkeypatch.setattr("moeclipse.ops.delta_rule.fla_kernel", lambda by_component: called)
    *rows, _ = inputs(by_component)
    assert states_read(*rows, BEGINS).shape == (2, 11, 4, 5)
    assert calls[0]["cu_seqlens"].tolist() == [0, 4, 5, 11, 18, 19, 22]
    assert calls[0]["v"].shape == (1, 22, 4, 5)
    states_read(*rows)
    assert "cu_seqlens" not in calls[1]
    assert calls[1]["use_qk_l2norm_in_kernel"]
    assert not any("kwargs" in call for call in calls), "no name that the kernel does not know"
