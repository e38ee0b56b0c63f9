"""The load of a run: who sent what to whom, in a file that outlives kills and that `place` reads."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_trainer import configure, whole
from torch.utils._python_dispatch import TorchDispatchMode

from moeclipse import MoE
from moeclipse.balance.asking import Asking
from moeclipse.balance.load import Load
from moeclipse.balance.regimes import Regimes
from moeclipse.cli.main import main
from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.testing.run_ranks import run_alone, run_ranks, run_ranks_raw
from moeclipse.train.checkpoints.checkpoint import Checkpoint
from moeclipse.train.config import TrainConfig
from moeclipse.train.placement.load_trace import LoadHistory, StepLoad, counts_of
from moeclipse.train.run.background_writer import Scribe
from moeclipse.train.step.learner import Learner


def sources(mesh: Mesh, config: TrainConfig) -> tuple[torch.Tensor, list[list[int]], list[list[int]]]:
    learner = Learner(config, mesh)
    record = learner.step(0)
    mine = [layer.load_E.tolist() for layer in learner.layers]
    return torch.from_numpy(learner.loads.average.rows_LPE.round()), record["load"], mine


class Operators(TorchDispatchMode):
    """Those that are called and make no view."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names += [] if func.is_view else [str(func)]
        return func(*args, **(kwargs or {}))


def test_loads_of_all_layers_are_put_together_by_two_launches() -> None:
    layers = {number: MoE(8, 8, 4, 2) for number in (0, 2)}
    for number, layer in layers.items():
        layer.load_E += torch.tensor([1, 2, 3, 4]) * (number + 1)
    with Operators() as found:
        counts_L7 = counts_of(layers, 3, 4, torch.device("cpu"))
    assert counts_L7.tolist() == [[1, 2, 3, 4, 0, 0, 0], [0] * 7, [3, 6, 9, 12, 0, 0, 0]]
    assert found.names == ["aten.zeros.default", "aten.cat.default"]
    assert counts_of({}, 0, 4, torch.device("cpu")).shape == (0, 7)


@pytest.mark.parametrize(("dp", "tp", "expert_tp"), [(1, 1, "folded"), (2, 1, "folded"), (1, 2, "sharded")])
def test_every_rank_knows_who_sent_what(tmp_path: Path, dp: int, tp: int, expert_tp: str) -> None:
    changes = {"moe.expert_tp": expert_tp, "model.num_kv_heads": 2, "parallel.tp": tp}
    results = run_ranks(2, sources, configure(tmp_path, **changes), dp=dp, tp=tp)
    for table_LPE, total, _ in results:
        assert torch.equal(table_LPE, results[0][0])
        assert table_LPE.sum(1).tolist() == total
        assert table_LPE.shape == (2, 1 if expert_tp == "sharded" else 2, 4)
    for rank, (table_LPE, _, mine) in enumerate(results[: results[0][0].shape[1]]):
        assert table_LPE[:, rank].tolist() == mine
    assert np.array(results[0][1]).sum() == 2 * 2 * 4 * 16  # layers x choices x samples x positions


def balances(mesh: Mesh, config: TrainConfig) -> tuple[list[list[int]], float | None]:
    record = Learner(config, mesh).step(0)
    return record["load"], record.get("balance")


def test_a_record_says_how_even_ranks_are(tmp_path: Path) -> None:
    """Under even shares: two experts each. With a replica of everything on both ranks: as even as can be."""
    for load_LE, balance in run_ranks(2, balances, configure(tmp_path)):
        fullest = [max(load[0] + load[1], load[2] + load[3]) for load in load_LE]
        expected = [sum(load) / 2 / most for load, most in zip(load_LE, fullest, strict=True)]
        assert balance == pytest.approx(sum(expected) / len(expected), abs=1e-4)
        assert balance < 0.99
    everywhere = {"placement.slots": ((0, 1, 2, 3), (0, 1, 2, 3))}
    assert all(balance > 0.99 for _, balance in run_ranks(2, balances, configure(tmp_path, **everywhere)))
    assert run_alone(balances, configure(tmp_path))[1] is None, "one rank is always even"


def read(config: TrainConfig) -> Load:
    return Load.read(Path(config.run.dir) / config.run.name / "load.npz")


def same(a: Load, b: Load) -> bool:
    names = ("average_LPE", "steps_N", "rows_NLE")
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in names)


def test_a_killed_run_ends_with_the_same_file(tmp_path: Path) -> None:
    config = configure(tmp_path, **{"run.name": "whole"})
    run_ranks(2, whole, config)
    expected = read(config)
    assert expected.steps_N.tolist() == list(range(6))
    assert expected.rows_NLE[0].sum() == 2 * 2 * 4 * 16
    config = configure(tmp_path, **{"run.name": "killed"})
    run_ranks_raw(
        2, whole, config, "off", 0, 4
    )  # the newest checkpoint holds 4 steps, the killed rank knew 5
    run_ranks(2, whole, config, "auto")
    assert same(read(config), expected)
    run_alone(whole, with_values(config, {"run.steps": 8}), "auto")
    longer = read(config)
    assert longer.steps_N.tolist() == list(range(8))
    assert longer.average_LPE.shape == (2, 1, 4)
    assert np.allclose(longer.average_LPE.sum((1, 2)), 2 * 4 * 16), "other ranks share the same rows"


def test_the_file_of_a_later_step_does_not_leak_into_an_earlier_one(tmp_path: Path) -> None:
    config = configure(tmp_path, **{"checkpoint.keep": 5})
    run_alone(whole, config)
    expected = read(config)
    for step in (4, 6):
        shutil.rmtree(tmp_path / f"runs/run/checkpoints/step-0000000{step}")
    run_alone(whole, config, "auto")
    assert same(read(config), expected)


def test_a_damaged_file_is_begun_anew(tmp_path: Path) -> None:
    config = configure(tmp_path)
    run_alone(whole, config)
    (tmp_path / "runs/run/load.npz").write_bytes(b"nothing")
    run_alone(whole, with_values(config, {"run.steps": 8}), "auto")
    assert read(config).steps_N.tolist() == [6, 7]


def test_a_long_run_writes_ever_more_seldom(tmp_path: Path) -> None:
    history, writes, scribe = LoadHistory(), [], Scribe()
    counts = torch.ones(2, 1, 3, dtype=torch.int64)
    seen = torch.zeros(1, 3, dtype=torch.int64)
    step_load = StepLoad(counts_PLE=counts, seen_L3=seen, load_LE=counts.sum(0))
    file = tmp_path / "load.npz"
    for step in range(1500):
        history.add(step, step_load)
        history.write(tmp_path, step + 1, scribe)
        if file.exists():
            writes.append(step + 1)
            file.unlink()
    assert writes[:4] == [20, 40, 60, 80]
    assert len(writes) < 50
    history.write(tmp_path, 1500, scribe, now=True)
    load = Load.read(file)
    assert len(load.steps_N) <= 256
    assert (load.steps_N[0], load.steps_N[-1], load.every) == (0, 1496, 8)


def test_loads_that_jump_make_layers_ask_for_shadows_anew() -> None:
    """And a resumed run knows as much of how long loads last."""
    rng, seen = np.random.default_rng(0), torch.zeros(1, 3, dtype=torch.int64)
    history, asking, rested = LoadHistory(), Asking(), []
    layer: Any = SimpleNamespace(schedule=SimpleNamespace(shadows=SimpleNamespace(asking=asking)))
    for step in range(40):
        weights_E = np.ones(8)
        weights_E[0 if step < 30 else 7] = 6.0
        drawn = torch.from_numpy(rng.multinomial(4000, weights_E / weights_E.sum(), size=(2, 1)))
        asking.asks, asking.left = False, 64
        history.add(step, StepLoad(counts_PLE=drawn, seen_L3=seen, load_LE=drawn.sum(0)), [layer])
        rested += [] if asking.asks else [step]
    assert rested == [step for step in range(40) if step != 30]
    assert [steps for steps, _ in history.trace.regimes.past] == [30]
    pieces = {piece.name: piece.data for piece in history.pieces()}
    assert Regimes.from_numbers(pieces["load/regimes"].tolist()) == history.trace.regimes


def test_place_draws_what_training_wrote(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    values: dict[str, Any] = {"gate.choose": "threshold", "gate.threshold": 0.24, "gate.bias_rate": 0.0}
    run_ranks(2, whole, configure(tmp_path, **values))
    folder = tmp_path / "runs/run"
    assert main(["place", str(folder / "load.npz"), "--plot", "--time-limit", "0"]) == 0
    out = capsys.readouterr().out
    assert "2 layers, 4 experts, 2 ranks with 3 slots each" in out
    assert "layer 1 " in out
    assert (folder / "load.png").read_bytes().startswith(b"\x89PNG")


def saved_average(mesh: Mesh, config: TrainConfig, folder: str) -> tuple[torch.Tensor, torch.Tensor]:
    learner = Learner(config, mesh)
    for step in range(3):
        learner.step(step)
    path = learner.save(Path(folder), 3)
    other = Learner(config, mesh)
    other.load(Checkpoint.open(path, mesh))
    return tuple(torch.from_numpy(one.loads.average.rows_LPE) for one in (learner, other))  # type: ignore[return-value]


def test_a_stage_without_experts_reads_the_average_too(tmp_path: Path) -> None:
    changes = {"model.num_dense_layers": 1, "parallel.pp": 2, "optim.accumulate": 2}
    for before, after in run_ranks(
        2, saved_average, configure(tmp_path, **changes), str(tmp_path / "c"), pp=2
    ):
        assert before.shape == (1, 1, 4)
        assert torch.equal(before, after)
