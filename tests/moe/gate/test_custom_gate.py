"""A module of the user's as a gate: what ours would say, said by another, gives the same layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from own_models import EXPERTS, FF, D, Expert, assert_alike, gradients, tokens
from torch import nn
from torch.utils.checkpoint import checkpoint

import moeclipse
from apart import apart
from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import ConfigError
from moeclipse.moe.config import GateConfig
from moeclipse.moe.gate.custom_gate import routing_of
from moeclipse.moe.gate.routing import Routing
from moeclipse.moe.layer import MoE
from moeclipse.moe.tokens import Tokens
from moeclipse.ops.random import fill_normal
from moeclipse.testing.run_ranks import run_alone, run_ranks


class MyGate(nn.Module):
    """Softmax over the best two, as ours; `config` asks for the losses."""

    def __init__(self, config: GateConfig | None = None) -> None:
        super().__init__()
        self.score = nn.Linear(D, EXPERTS, bias=False, dtype=torch.float64)
        fill_normal(self.score.weight.data, 7, 0.5)
        if config is not None:
            self.config = config

    def forward(self, x_TD: torch.Tensor, given: Tokens) -> Routing:
        assert given.total >= len(x_TD)
        logits_TE = self.score(x_TD)
        best_TK, ids_TK = logits_TE.topk(2)
        return routing_of(ids_TK, best_TK.softmax(-1), EXPERTS, logits_TE)


LOSSES = GateConfig(top_k=2, balance_loss=0.3, z_loss=0.1)


def outcome(mesh: Mesh | None, own: bool, again: str, exchange: dict[str, Any], count: int) -> Any:
    gate: Any = MyGate(LOSSES) if own else LOSSES
    options: dict[str, Any] = {"mesh": mesh, "init_std": 0.5, "dtype": torch.float64, "exchange": exchange}
    moe = MoE(D, FF, EXPERTS, gate=gate, **options)
    if not own:
        fill_normal(moe.gate.weight.data, 7, 0.5)
    size = 1 if mesh is None else mesh.num_ranks
    whole = tokens(count=count)
    x = whole.chunk(size)[0 if mesh is None else mesh.rank].clone().requires_grad_()
    y = checkpoint(moe, x, use_reentrant=again == "reentrant") if again else moe(x)
    (y.square().sum() + moe.last.aux_loss).backward()
    found = {name.replace("gate.module.score.", "gate."): grad for name, grad in gradients(moe).items()}
    return found | {"dx": x.grad, "y": y.detach()}


def on_ranks(mesh: Mesh, again: str, exchange: dict[str, Any]) -> Any:
    return outcome(mesh, True, again, exchange, 8)


@pytest.mark.parametrize(
    ("again", "exchange"),
    [("", {}), ("plain", {"schedule": "smart", "chunks": 2}), ("reentrant", {"shadow": (0, 4)})],
)
def test_a_gate_of_ones_own_is_as_good_as_ours(again: str, exchange: dict[str, Any]) -> None:
    expected = run_alone(lambda _: outcome(None, False, "", {}, 8))
    results = run_ranks(2, on_ranks, again, exchange)
    found = {name: torch.cat([r[name] for r in results]) for name in results[0]}
    found["gate.weight"] = results[0]["gate.weight"] + results[1]["gate.weight"]
    assert_alike(found, expected)


@apart
def test_without_a_configuration_there_are_no_losses() -> None:
    moe = MoE(D, 1, EXPERTS, gate=MyGate(), experts=Expert, dtype=torch.float64)
    moe(tokens())
    assert float(moeclipse.aux_loss(moe)) == 0
    assert moe.load_E.sum() == 2 * len(tokens())
    moeclipse.sync_gradients(moe)
    moe.reset_parameters()
    moe.double()


@apart
def test_what_is_no_routing_is_refused() -> None:
    class Wrong(MyGate):
        def forward(self, x_TD: torch.Tensor, given: Tokens) -> Any:
            return self.score(x_TD)

    class Short(MyGate):
        def forward(self, x_TD: torch.Tensor, given: Tokens) -> Routing:
            return super().forward(x_TD[1:], given)

    for kind, text in ((Wrong, "return a moeclipse.Routing"), (Short, r"must be \[tokens, choices\]")):
        moe = MoE(D, FF, EXPERTS, gate=kind(), dtype=torch.float64)
        with pytest.raises(ConfigError, match=text):
            moe(tokens())


class Names(nn.Module):
    """A gate that sends every token to one number."""

    def __init__(self, number: int, helped: bool, num_experts: int = EXPERTS) -> None:
        super().__init__()
        self.number, self.helped, self.num_experts = number, helped, num_experts

    def forward(self, x_TD: torch.Tensor, tokens: Tokens) -> Routing:
        ids, scores = torch.full((len(x_TD), 1), self.number), x_TD.new_ones(len(x_TD), 1)
        if self.helped:
            return moeclipse.routing_of(ids, scores, self.num_experts)
        zeros = x_TD.new_zeros(len(x_TD), self.num_experts)
        load_E = zeros.sum(0).long()
        return Routing(expert_ids_TK=ids, scores_TK=scores, load_E=load_E, probs_TE=zeros, logits_TE=zeros)


@pytest.mark.parametrize("helped", [False, True])
@pytest.mark.parametrize("number", [EXPERTS, -2])
def test_an_expert_that_is_not_there_is_named_with_the_gate(number: int, helped: bool) -> None:
    who = "routing_of" if helped else "the layer of Names"
    with pytest.raises(ConfigError, match=f"{who} got expert {number} from a gate; .* 0 to {EXPERTS - 1}"):
        MoE(D, FF, EXPERTS, gate=Names(number, helped))(torch.rand(3, D))
    assert MoE(D, FF, EXPERTS, gate=Names(-1, helped))(torch.rand(3, D)).eq(0).all()


def test_loads_of_another_number_of_experts_are_refused() -> None:
    with pytest.raises(ConfigError, match=rf"the gate Names returned loads of shape \({EXPERTS + 1},\)"):
        MoE(D, FF, EXPERTS, gate=Names(0, True, EXPERTS + 1))(torch.rand(3, D))


class Fails(nn.Module):
    def forward(self, x_TD: torch.Tensor, tokens: Tokens) -> Routing:
        raise KeyError("choices")


def test_what_a_gate_raises_names_it() -> None:
    with pytest.raises(KeyError) as raised:
        MoE(6, 12, 4, gate=Fails())(torch.ones(2, 6))
    assert raised.value.__notes__ == ["raised by the gate Fails that the layer was given"]
