"""The runtime runs what the verifier proved, over layers with and without parts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import ConfigError, ScheduleError
from moeclipse.pipeline.config import PipelineConfig
from moeclipse.pipeline.overlap import choose_schedule, lay_out, make_program
from moeclipse.pipeline.runtime import Runtime
from moeclipse.pipeline.stage import describe
from moeclipse.schedule import kinds
from moeclipse.schedule.check import Verified, verify
from moeclipse.schedule.kinds import Form
from moeclipse.schedule.op import Op
from moeclipse.tensor.weight_grad import WeightGrads
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_alone, run_ranks

WIDTH, ROWS, LAYERS, M = 6, 5, 4, 4


class Block(nn.Module):
    """A user's layer: it knows nothing of parts."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)
        self.dropout = nn.Dropout(0.3)

    def forward(self, h: torch.Tensor, microbatch: Any) -> torch.Tensor:
        return h + self.down(self.dropout(torch.tanh(self.up(h)))) * (1 + microbatch.number)


@dataclass
class Rows:
    number: int
    x: torch.Tensor
    loss: torch.Tensor | None = None

    @property
    def rows(self) -> int:
        return len(self.x)


@dataclass
class UserStage:
    layers: list[nn.Module]
    embed: Any
    head: Any


def model() -> tuple[nn.Parameter, list[Block]]:
    torch.manual_seed(3)
    scale = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))
    return scale, [Block().double() for _ in range(LAYERS)]


def data() -> list[Rows]:
    torch.manual_seed(4)
    return [Rows(m, torch.randn(ROWS + m % 2, WIDTH, dtype=torch.float64)) for m in range(M)]


def reference(mesh: Mesh) -> list[torch.Tensor]:
    scale, blocks = model()
    for block in blocks:
        block.eval()
    for part in data():
        h = part.x * scale
        for block in blocks:
            h = block(h, part)
        (h.square().sum() * 0.5).backward()
    return [p.grad for p in [scale, *(p for block in blocks for p in block.parameters())]]  # type: ignore[misc]


def staged(mesh: Mesh, config: PipelineConfig, train: bool) -> dict[str, torch.Tensor]:
    scale, blocks = model()
    for block in blocks:
        block.train(train)
    layout = lay_out(config, LAYERS, mesh.pp, M)
    shapes = [describe(block) for block in blocks]
    verified = make_program(config, layout, shapes, mesh.pp, M)
    stages = {
        number: UserStage(
            layers=[blocks[i] for i in layers],
            embed=(lambda part: part.x * scale) if 0 in layers else None,
            head=(lambda h, part: h.square().sum()) if LAYERS - 1 in layers else None,
        )
        for number, layers in layout.held_by(mesh.pp_index).items()
    }
    parts = data()
    runtime = Runtime(verified, mesh, stages, WeightGrads(), width=WIDTH, dtype=torch.float64)
    runtime.step(lambda m, chunk, chunks: parts[m], torch.tensor(0.5, dtype=torch.float64))
    everything = {"scale": scale}
    everything |= {f"{i}.{name}": p for i, b in enumerate(blocks) for name, p in b.named_parameters()}
    return {name: p.grad for name, p in everything.items() if p.grad is not None}


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "vpp+1", "dualpipev"])
@pytest.mark.parametrize("recompute", ["off", "full"])
def test_a_users_own_layers_run_unsplit(schedule: str, recompute: str) -> None:
    config = PipelineConfig(schedule=schedule, overlap="pair+self", recompute=recompute)  # type: ignore[arg-type]
    expected = run_alone(reference)
    found: dict[str, torch.Tensor] = {}
    for part in run_ranks(2, staged, config, False, pp=2):
        assert not set(part) & set(found), "every parameter has its gradient on one rank"
        found |= part
    names = ["scale"] + [f"{i}.{n}" for i in range(LAYERS) for n, _ in Block().named_parameters()]
    for name, wanted in zip(names, expected, strict=True):
        assert difference(found[name], wanted) < 1e-12, name


def test_recompute_draws_the_same_numbers() -> None:
    """Dropout: forward and its second run must agree, or gradients belong to another model."""
    kept = run_alone(staged, PipelineConfig(schedule="1f1b"), True)
    again = run_alone(staged, PipelineConfig(schedule="1f1b", recompute="full"), True)
    assert all(torch.equal(kept[name], again[name]) for name in kept)


def test_what_the_verifier_refuses_cannot_be_run() -> None:
    config = PipelineConfig(schedule="1f1b-pairs", overlap="pair")
    layout = lay_out(config, 2, 2, 4)
    verified = make_program(config, layout, [describe(Block())] * 2, 2, 4)
    assert isinstance(verified, Verified)
    ops = list(verified.program.ranks[0])
    place = next(i for i, op in enumerate(ops) if op.kind is kinds.MLP_F)
    broken = replace(
        verified.program, ranks=(tuple(ops[:place] + ops[place + 1 :]), verified.program.ranks[1])
    )
    with pytest.raises(ScheduleError, match="MLP_F"):
        verify(broken)


@pytest.mark.parametrize(
    ("config", "layers", "ranks", "microbatches", "message"),
    [
        (PipelineConfig(), 1, 2, 4, "makes 2 stages, but model.num_layers is 1"),
        (PipelineConfig(schedule="dualpipev"), 8, 2, 3, "nearest legal: ranks=2, microbatches=4"),
        (
            PipelineConfig(layers=(1, 2)),
            4,
            2,
            4,
            r"must list the layers of 2 stages, 4 \(model.num_layers\) in all",
        ),
        (PipelineConfig(schedule="vpp+1", layers_per_virtual_stage=1), 8, 2, 5, "rounds of equal size"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(
    config: PipelineConfig, layers: int, ranks: int, microbatches: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        lay_out(config, layers, ranks, microbatches)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (PipelineConfig(schedule="1f1b", overlap="pair"), "1f1b-pairs"),
        (PipelineConfig(chunks=0), "at least 1"),
        (PipelineConfig(layers=(1, 0)), "at least one layer"),
        (PipelineConfig(recompute_layers=-1), "negative"),
        (PipelineConfig(comm_sms=-1), "comm_sms"),
    ],
)
def test_bad_settings_are_named(config: PipelineConfig, problem: str) -> None:
    assert any(problem in line for line in config.problems())


def test_auto_takes_pairs_where_there_is_overlap() -> None:
    pair = PipelineConfig(overlap="pair+self")
    assert choose_schedule(PipelineConfig(), 8, 4, 8) == "1f1b"
    assert choose_schedule(pair, 8, 1, 8) == "pp1"
    assert choose_schedule(pair, 8, 4, 8) == "vpp+1"
    assert choose_schedule(pair, 4, 4, 8) == "1f1b-pairs"
    assert choose_schedule(pair, 4, 1, 1) == "1f1b"


@pytest.mark.parametrize(("wanted", "again"), [(0, []), (1, [0]), (3, [0, 1, 2]), ("all", [0, 1, 2, 3])])
def test_only_the_first_layers_run_again(wanted: Any, again: list[int]) -> None:
    config = PipelineConfig(schedule="1f1b", recompute="full", recompute_layers=wanted)
    layout = lay_out(config, LAYERS, 1, M)
    (ops,) = make_program(config, layout, [describe(Block())] * LAYERS, 1, M).program.ranks
    assert sorted({op.layer for op in ops if op.kind.form is Form.R}) == again  # type: ignore[type-var]


def wires(mesh: Mesh) -> list[tuple[str, int, int]]:
    """Which of the communicators between stages were used."""
    used, real = set(), mesh.pipe

    def pipe(letter: str, source: int, target: int) -> Any:
        used.add((letter, source, target))
        return real(letter, source, target)

    mesh.pipe = pipe  # type: ignore[method-assign, assignment]
    staged(mesh, PipelineConfig(schedule="1f1b"), False)
    return sorted(used)


def test_activations_and_gradients_never_share_a_communicator() -> None:
    """Messages of one communicator meet in order: a receive that was posted early would block a send."""
    assert run_ranks(2, wires, pp=2) == [[("B", 1, 0), ("F", 0, 1)]] * 2


def test_ops_are_told_as_they_run() -> None:
    assert run_alone(observed) > 20


def observed(mesh: Mesh) -> int:
    config = PipelineConfig(schedule="1f1b")
    layout = lay_out(config, LAYERS, 1, M)
    scale, blocks = model()
    verified = make_program(config, layout, [describe(block) for block in blocks], 1, M)
    stage = UserStage(blocks, lambda part: part.x * scale, lambda h, _: h.sum())  # type: ignore[arg-type]
    runtime = Runtime(verified, mesh, {0: stage}, WeightGrads(), width=WIDTH, dtype=torch.float64)
    seen: list[Op] = []
    runtime.observe = lambda op, begun, ended: seen.append(op)
    parts = data()
    runtime.step(lambda m, chunk, chunks: parts[m], torch.tensor(1.0, dtype=torch.float64))
    assert [str(op) for op in seen] == [str(op) for op in verified.program.ranks[0]]
    return len(seen)
