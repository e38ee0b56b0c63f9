"""`moeclipse.overlap`: microbatches that take turns have the gradients of the plain loop."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from own_models import TOKENS, D, assert_alike, gradients, layer, often, tokens
from torch import nn
from torch.utils.checkpoint import checkpoint

import moeclipse
from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import ConfigError
from moeclipse.ops.random import fill_normal, key_of
from moeclipse.testing.run_ranks import run_alone, run_ranks

LAYERS = 3


class Model(nn.Module):
    """Layers of the user's around ours; `again` is how often a block's forward runs."""

    def __init__(self, mesh: Mesh | None, kind: str, gate: str, again: str, exchange: dict[str, Any]) -> None:
        super().__init__()
        options: dict[str, Any] = {"mesh": mesh, "exchange": exchange, "num_shared_experts": 1}
        self.moes = nn.ModuleList(layer(kind, gate, layer=number, **options) for number in range(LAYERS))
        self.dense = nn.ModuleList(nn.Linear(D, D, dtype=torch.float64) for _ in range(LAYERS))
        for name, parameter in self.dense.named_parameters():
            fill_normal(parameter.data, key_of("dense", name), 0.5)
        self.again = again

    def block(self, x: torch.Tensor, number: int) -> torch.Tensor:
        return x + self.moes[number](torch.tanh(self.dense[number](x)))

    def two(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(self.block(x, 0), 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.again:
            x = checkpoint(self.two, x, use_reentrant=False)
        else:
            x = self.two(x)
        return self.block(x, 2)


def sizes(number: int, ranks: int) -> list[int]:
    """Tokens of each rank in a microbatch; in the second one the last rank has none."""
    return [
        0 if number == 1 and rank == ranks - 1 and ranks > 1 else TOKENS - number for rank in range(ranks)
    ]


def batch(number: int, ranks: int, rank: int | None = None) -> torch.Tensor:
    parts = [tokens(number, r, count) for r, count in enumerate(sizes(number, ranks))]
    return torch.cat(parts) if rank is None else parts[rank]


def total(number: int, ranks: int) -> int:
    return sum(sizes(number, ranks))


def plain(mesh: Mesh, kind: str, gate: str, count: int, ranks: int) -> dict[str, torch.Tensor]:
    model = Model(None, kind, gate, "", {})
    outputs = {}
    for number in range(count):
        y = model(batch(number, ranks))
        outputs[f"y{number}"] = y.detach()
        ((y.square().sum() / total(number, ranks) + moeclipse.aux_loss(model)) / count).backward()
    return gradients(model) | outputs


def overlapped(
    mesh: Mesh, kind: str, gate: str, count: int, again: str, exchange: dict[str, Any], inside: bool
) -> dict[str, torch.Tensor]:
    ranks = mesh.num_ranks
    model = Model(mesh, kind, gate, again, exchange)
    loads = [moe.load_E.clone() for moe in model.moes]

    def loss(number: int, y: torch.Tensor) -> torch.Tensor:
        return ranks * y.square().sum() / total(number, ranks)

    def whole(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        y = model(batch(number, ranks, mesh.rank))
        return y, loss(number, y) + moeclipse.aux_loss(model)

    if inside:
        results = moeclipse.overlap(model, range(count), whole)
        outputs = [y.detach() for y, _ in results]
        (sum(each for _, each in results) / count).backward()
    else:
        results = moeclipse.overlap(model, [batch(number, ranks, mesh.rank) for number in range(count)])
        outputs = [y.detach() for y in results]
        losses = [loss(number, y) for number, y in enumerate(results)]
        (sum(losses) / count + moeclipse.aux_loss(model)).backward()
    for moe, before in zip(model.moes, loads, strict=True):
        mine = sum(sizes(number, ranks)[mesh.rank] for number in range(count))
        assert (moe.load_E - before).sum() <= 3 * mine, "each token counted once"
        assert moe.turns is None
    moeclipse.sync_gradients(model)
    found = gradients(model)
    for name in found:
        if ".experts." not in name:
            torch.distributed.all_reduce(found[name]) if ranks > 1 else None
            found[name] /= ranks
    return found | {f"y{number}": y for number, y in enumerate(outputs)}


def joined(results: list[dict[str, torch.Tensor]], kind: str) -> dict[str, torch.Tensor]:
    found = dict(results[0])
    for name in found:
        if name.startswith("y") or (".experts." in name and kind != "modules"):
            found[name] = torch.cat([result[name] for result in results])
    if kind == "modules":
        found |= {name: value for result in results for name, value in result.items() if ".experts." in name}
    return found


SMART = {"schedule": "smart", "chunks": 2, "group_size": 1}
CASES = [
    ("built-in", "softmax", 2, 2, "", {}, False),
    ("built-in", "softmax", 2, 5, "", SMART, True),
    ("biased", "noisy", 2, 3, "", {"schedule": "smart"}, True),
    ("kernels", "gshard", 2, 2, "two", {}, True),
    ("built-in", "noisy", 3, 3, "two", SMART, False),
    ("modules", "gap", 2, 2, "two", {"schedule": "smart", "chunks": 2, "shadow": (0, 3)}, False),
    ("built-in", "softmax", 2, 1, "", {}, False),
    ("built-in", "softmax", 1, 2, "two", {}, False),
    ("built-in", "softmax", 2, 2, "", {"transport": "two_level"}, False),
]


@pytest.mark.parametrize(
    ("kind", "gate", "ranks", "count", "again", "exchange", "inside"),
    often(CASES, CASES[0], CASES[1], CASES[4], CASES[5]),
)
def test_gradients_are_those_of_the_plain_loop(
    kind: str, gate: str, ranks: int, count: int, again: str, exchange: dict[str, Any], inside: bool
) -> None:
    expected = run_alone(plain, kind, gate, count, ranks)
    results = run_ranks(ranks, overlapped, kind, gate, count, again, exchange, inside)
    assert_alike(joined(results, kind), expected)


class Dropping(nn.Module):
    """Random numbers before and behind the layer, in a block that runs again inside backward."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.first, self.second = layer(mesh=mesh, layer=0), layer(mesh=mesh, layer=1)
        self.seen: list[torch.Tensor] = []

    def drop(self, x: torch.Tensor) -> torch.Tensor:
        kept = torch.nn.functional.dropout(torch.ones_like(x), 0.5)
        self.seen.append(kept)
        return x * kept

    def block(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.second(self.drop(self.first(self.drop(x)))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x, use_reentrant=False, early_stop=False)


def repeated(mesh: Mesh) -> None:
    model = Dropping(mesh)
    torch.manual_seed(3)
    outputs = moeclipse.overlap(model, [tokens(0, mesh.rank), tokens(1, mesh.rank)])
    forward = list(model.seen)
    sum(y.sum() for y in outputs).backward()
    again = model.seen[len(forward) :]
    assert len(forward) == len(again) == 6
    count = [sum(torch.equal(mask, other) for other in again) for mask in forward]
    assert count == [1] * 6, "every mask comes once more in backward, and no two are alike"
    after = torch.rand(3)
    torch.manual_seed(3)
    assert not torch.equal(after, torch.rand(3)), "the generator of the process has gone on"


def test_random_numbers_of_a_microbatch_come_again_in_its_backward() -> None:
    run_ranks(2, repeated)


def under_ddp(mesh: Mesh, way: str) -> dict[str, torch.Tensor]:
    """Two steps; `way` says how microbatches run."""
    model: Any = moeclipse.parallelize(Model(mesh, "built-in", "softmax", "", {}), mesh, dense="ddp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(2):
        given = [tokens(2 * step + number, mesh.rank) for number in range(2)]
        if way == "overlap":
            outputs = moeclipse.overlap(model, given)
            (sum(y.square().mean() for y in outputs) / 2 + moeclipse.aux_loss(model)).backward()
        else:
            for number, x in enumerate(given):
                with model.no_sync() if number == 0 else nullcontext():
                    ((model(x).square().mean() + moeclipse.aux_loss(model)) / 2).backward()
        moeclipse.sync_gradients(model)
        moeclipse.clip_grad_norm_(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_two_steps_under_ddp() -> None:
    for found, expected in zip(run_ranks(2, under_ddp, "overlap"), run_ranks(2, under_ddp, ""), strict=True):
        assert_alike(found, expected)


def settings(mesh: Mesh) -> None:
    """What the caller's thread has set holds in the threads of microbatches."""
    model = Model(mesh, "built-in", "softmax", "", {}).float()
    given = [tokens(number, mesh.rank).float() for number in range(3)]
    for context in (torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)):
        with context():
            found = moeclipse.overlap(model, given)
            expected = [model(x) for x in given]
        for mine, wanted in zip(found, expected, strict=True):
            assert mine.dtype == wanted.dtype
            assert mine.requires_grad == wanted.requires_grad
            assert torch.equal(mine, wanted)
    model.eval()
    assert all(
        torch.equal(a, b) for a, b in zip(moeclipse.overlap(model, given), map(model, given), strict=True)
    )


def test_grad_mode_autocast_and_eval_hold_inside() -> None:
    run_ranks(2, settings)


def broken(mesh: Mesh) -> list[str]:
    model = Model(mesh, "built-in", "softmax", "", {})

    def call(number: int) -> torch.Tensor:
        y = model(tokens(number, mesh.rank))
        if number == 1:
            raise KeyError("no such label")
        return y

    texts = []
    for wrong in (
        lambda: moeclipse.overlap(model, range(3), call),
        lambda: moeclipse.overlap(model, []),
        lambda: moeclipse.overlap(nn.Linear(D, D), [tokens()]),
        lambda: moeclipse.overlap(moeclipse.parallelize(model, mesh, dense="fsdp2"), [tokens()]),
    ):
        try:
            wrong()
        except (KeyError, ConfigError) as error:
            texts.append(str(error))
    return texts


def test_what_goes_wrong_is_told() -> None:
    for failed, none, no_layers, sharded in run_ranks(2, broken):
        assert failed == "'no such label'"
        assert none == no_layers == "overlap needs a model with MoE layers, and at least one microbatch"
        assert "use moeclipse.parallelize(model, mesh, dense='ddp')" in sharded


def twice(mesh: Mesh) -> None:
    """A part of the results is enough for backward, a second backward raises torch's own error."""
    model = Model(mesh, "built-in", "softmax", "", {})
    first, _ = moeclipse.overlap(model, [tokens(0, mesh.rank), tokens(1, mesh.rank)])
    loss = first.square().mean()
    loss.backward(retain_graph=True)
    once = gradients(model)
    loss.backward()
    assert_alike({name: grad / 2 for name, grad in gradients(model).items()}, once, 1e-14)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_backward_again() -> None:
    run_ranks(2, twice)
