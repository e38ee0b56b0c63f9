"""The model from its definition: counts, causality, and weights that ignore layouts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from small_model import GATE, MLA, MODEL, MOE, build

from moeclipse.comm.mesh import Mesh
from moeclipse.model.config import ModelConfig
from moeclipse.model.transformer import Transformer
from moeclipse.moe.tokens import Tokens
from moeclipse.tensor.cut import cut_of
from moeclipse.testing.run_ranks import run_alone, run_ranks


def losses(config: ModelConfig, ids: torch.Tensor) -> torch.Tensor:
    """Cross-entropy at each position, one position at a time."""
    model = build(config).eval()
    values = []
    for stop in range(1, ids.shape[1]):
        window = ids[:, :stop]
        out = model(window, ids[:, 1 : stop + 1], Tokens(mesh=model.mesh, first=0, total=window.numel()))
        values.append(out.loss_sum.detach())
    return torch.stack(values)


@pytest.mark.parametrize("config", [MODEL, MLA], ids=["gqa", "mla"])
def test_no_position_sees_its_future(config: ModelConfig) -> None:
    ids = torch.randint(0, 40, (1, 9), generator=torch.Generator().manual_seed(0))
    other = ids.clone()
    other[:, 6:] = (other[:, 6:] + 1) % 40
    a, b = losses(config, ids), losses(config, other)
    assert torch.equal(a[:5], b[:5])
    assert not torch.equal(a[6:], b[6:])


def weights(mesh: Mesh) -> dict[str, torch.Tensor]:
    model = build(MODEL, mesh=mesh)
    found = {}
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            head, key = name.rsplit(".", 1)
            ids = model.get_submodule(head).ids
            found |= {f"{head}.{e}.{key}": parameter.data[slot].clone() for slot, e in enumerate(ids)}
        else:
            found[name] = parameter.data.clone()
    return found


def test_initial_weights_ignore_the_layout() -> None:
    expected = run_alone(weights)
    seen: set[str] = set()
    for found in run_ranks(4, weights):
        assert all(torch.equal(value, expected[name]) for name, value in found.items())
        seen |= found.keys()
    assert seen == expected.keys()
    values = [value.flatten()[0].item() for name, value in expected.items() if "norm" not in name]
    assert len(set(values)) == len(values), "no two tensors are alike"


def parts(mesh: Mesh, config: ModelConfig, expert_tp: str) -> list[tuple[str, dict, torch.Tensor]]:
    """(logical name, how it is cut, this rank's part) of every parameter."""
    moe = replace(MOE, expert_tp=expert_tp)
    model = Transformer(config, moe, GATE, mesh=mesh, seed=3, dtype=torch.float64)
    found = []
    for name, parameter in model.named_parameters():
        cut = cut_of(parameter)
        facts = {} if cut is None else {"dim": cut.dim, "at": [cut.start, cut.stop], "blocks": cut.blocks}
        if ".experts." in name:
            head, key = name.rsplit(".", 1)
            ids = model.get_submodule(head).ids
            found += [(f"{head}.{e}.{key}", facts, parameter.data[s].clone()) for s, e in enumerate(ids)]
        else:
            found.append((name, facts, parameter.data.clone()))
    return found


@pytest.mark.parametrize("expert_tp", ["folded", "sharded"])
@pytest.mark.parametrize("config", [MODEL, MLA], ids=["gqa", "mla"])
def test_initial_weights_of_parts_are_those_of_the_whole(config: ModelConfig, expert_tp: str) -> None:
    expected = {name: value for name, _, value in run_alone(parts, config, expert_tp)}
    covered = dict.fromkeys(expected, 0)
    for found in run_ranks(2, parts, config, expert_tp, tp=2):
        for name, facts, value in found:
            whole = expected[name]
            value = value.view(-1, *whole.shape[-1:]) if whole.dim() == 2 and not facts else value
            if facts and facts["dim"] == 1:
                whole = whole[..., facts["at"][0] : facts["at"][1]]
            elif facts:
                whole = whole.unflatten(-2, (facts["blocks"], -1))[..., facts["at"][0] : facts["at"][1], :]
                whole = whole.flatten(-3, -2)
            assert torch.equal(value, whole), name
            covered[name] += value.numel()
    folded = expert_tp == "folded"
    whole_on_both = [n for n, count in covered.items() if count == 2 * expected[n].numel()]
    assert all(count in (1, 2) for count in (covered[n] // expected[n].numel() for n in covered))
    for name in whole_on_both:
        narrow = any(word in name for word in ("norm", "gate", "q_down", "kv_down"))
        assert narrow or (folded and "shared" in name), f"{name} is whole on both ranks"


def test_a_rank_without_samples_runs() -> None:
    def empty(mesh: Mesh) -> float:
        model = build(MODEL, mesh=mesh)
        ids = torch.zeros(0 if mesh.rank else 2, 5, dtype=torch.int64)
        out = model(ids, ids, Tokens(mesh=mesh, first=0 if mesh.rank == 0 else 10, total=10))
        (out.loss_sum + out.aux_loss).backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        return float(out.loss_sum)

    assert run_ranks(2, empty)[1] == 0.0
