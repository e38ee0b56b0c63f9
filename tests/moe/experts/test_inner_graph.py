"""A module's graph whose tensors are kept by somebody else."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from apart import apart
from moeclipse.moe.experts.inner_graph import InnerGraph
from moeclipse.testing.compare import difference


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def expected(module: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(module(x), [x, *module.parameters()], dy)


@apart
def test_gradients_are_those_of_the_module() -> None:
    module, x, dy = net(), torch.randn(3, 4).double(), torch.randn(3, 2).double()
    with torch.no_grad():  # as inside a node
        y, graph = InnerGraph.record(module, [x], list(module.parameters()))
        assert torch.equal(y, module(x))
        found = graph.backward(dy)
    for one, other in zip(found, expected(module, x, dy), strict=True):
        assert difference(one, other) <= 1e-15


@apart
def test_nothing_but_the_list_keeps_tensors_and_others_can_take_their_place() -> None:
    module, x, dy = net(), torch.randn(3, 4).double(), torch.randn(3, 2).double()
    wanted = expected(module, x, dy)
    y, graph = InnerGraph.record(module, [x.clone()], list(module.parameters()))
    copies = tuple(tensor.clone() for tensor in graph.tensors)
    fleeting = [t for t in graph.tensors if all(t.data_ptr() != p.data_ptr() for p in module.parameters())]
    references = [StorageWeakRef(tensor.untyped_storage()) for tensor in fleeting]
    assert len(references) >= 2, "the input and the result of tanh"
    graph = replace(graph, tensors=())
    del fleeting, y
    gc.collect()
    assert all(reference.expired() for reference in references)
    for one, other in zip(replace(graph, tensors=copies).backward(dy), wanted, strict=True):
        assert difference(one, other) <= 1e-15


@apart
def test_integers_and_frozen_weights_get_none() -> None:
    module, ids = net(), torch.tensor([1, 0, 1])
    module[0].requires_grad_(False)

    def run(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return module(x) * ids[:, None]

    _, graph = InnerGraph.record(run, [torch.ones(3, 4).double(), ids], list(module.parameters()))
    found = graph.backward(torch.ones(3, 2).double())
    assert [grad is None for grad in found] == [False, True, True, True, False, False]


@apart
def test_a_result_that_depends_on_nothing_has_no_gradients() -> None:
    y, graph = InnerGraph.record(lambda x: torch.zeros(len(x), 2), [torch.ones(3, 4)], [])
    assert y.shape == (3, 2)
    assert graph.backward(torch.ones(3, 2)) == [None]


@apart
def test_a_graph_that_was_changed_in_place_is_refused() -> None:
    def spoil(x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x).mul_(2)

    _, graph = InnerGraph.record(spoil, [torch.ones(3)], [])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        graph.backward(torch.ones(3))
