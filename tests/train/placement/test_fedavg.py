"""fedavg: replicas step for themselves and are averaged by the rows they have seen."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from placed import build
from test_learner import configure, corpus  # noqa: F401  (a fixture)
from test_model_placement import compare

from moeclipse.balance.placement import Placement
from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import problems_of
from moeclipse.testing.run_ranks import run_ranks
from moeclipse.train.config import TrainConfig
from moeclipse.train.placement.fedavg import average_replicas
from moeclipse.train.step.integrity import replica_differences
from moeclipse.train.step.learner import Learner
from moeclipse.train.step.pipelined import chunks_of

TABLE = ((0, 1), (1, 2), (2, 1))
ROWS = {(0, 0): 7, (1, 0): 1, (1, 1): 4, (1, 2): 5, (2, 1): 0, (2, 2): 0}
"""(expert, rank) -> rows that the replica has seen."""


def averaged(mesh: Mesh) -> list[list[float]]:
    placed = build(mesh, Placement(TABLE), "fedavg", torch.float64)
    for state in placed.states:
        owned = placed.buckets[0].owners_here
        for at, owner in enumerate(owned):
            state.weight.view(len(owned), -1)[at] = 10.0**mesh.rank * (1 + owner.expert)
    rows = [ROWS[expert, mesh.rank] for expert in TABLE[mesh.rank]]
    placed.layer.schedule._computed = rows
    average_replicas([placed])
    assert replica_differences([placed]) == []
    assert placed.layer.schedule.take_computed() == []
    return [placed.buckets[0].rows[slot, 0].item() for slot in range(2)]


def test_weights_are_averaged_by_rows() -> None:
    found = run_ranks(3, averaged)
    one = 2 * (1 * 1 + 4 * 10 + 5 * 100) / 10
    none = 3 * (10 + 100) / 2  # nobody has seen a row of expert 2: the plain mean
    assert torch.allclose(torch.tensor(found), torch.tensor([[1.0, one], [one, none], [none, one]]))


def trained(mesh: Mesh, config: TrainConfig, steps: int, folder: str) -> tuple[list, list[float]]:
    learner = Learner(config, mesh)
    losses = [learner.step(step)["loss"] for step in range(steps)]
    learner.save(Path(folder), steps)
    return [(piece.name, piece.start, piece.data.clone()) for piece in learner.optim.pieces()], losses


def states(results: list[tuple[list, list[float]]]) -> dict[str, torch.Tensor]:
    parts = [(name, start, data) for pieces, _ in results for name, start, data in pieces]
    found: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for name, start, data in parts:
        found.setdefault(name, []).append((start, data))
    return {
        name: torch.cat([data for _, data in sorted(some, key=lambda p: p[0])])
        for name, some in found.items()
    }


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.full)])
def test_fedavg_is_another_model_but_replicas_agree(every: int, corpus: str, tmp_path: Path) -> None:  # noqa: F811
    shared = {"placement.slots": ((0, 1, 2), (3, 4, 0), (1, 3)), "integrity.every": 1}
    fed = {"placement.reduce": "fedavg", "placement.average_every": every}
    results = run_ranks(3, trained, configure(corpus, **shared, **fed), 6, str(tmp_path / "a"))
    summed = run_ranks(3, trained, configure(corpus, **shared), 6, str(tmp_path / "b"))
    assert results[0][1] != summed[0][1]
    assert results[0][1][-1] < results[0][1][0]
    alone = {**shared, "placement.slots": ((0, 1), (3, 4), (2,))}
    plain = states(run_ranks(3, trained, configure(corpus, **alone), 3, str(tmp_path / "c")))
    same = states(run_ranks(3, trained, configure(corpus, **alone, **fed), 3, str(tmp_path / "d")))
    compare(same, plain, bound=1e-15)  # without replicas there is nothing to average


def test_fedavg_with_random_re_placements(corpus: str, tmp_path: Path) -> None:  # noqa: F811
    moving = {"placement.planner": "random", "placement.start_step": 1, "placement.every": 2}
    fed = {"placement.reduce": "fedavg", "placement.slots_per_rank": 4, "integrity.every": 1}
    config = configure(corpus, **moving, **fed)
    for _, losses in run_ranks(4, trained, config, 7, str(tmp_path), dp=2):
        assert losses[-1] < losses[0]


def test_what_a_replica_learns_from_is_no_matter_of_speed(corpus: str) -> None:  # noqa: F811
    """Shadows and cut microbatches would share rows out over replicas in another way."""
    slots = {"placement.slots": ((0, 1, 2), (3, 4, 0)), "parallel.ep": 2}
    fed = {**slots, "placement.reduce": "fedavg"}
    shadowed = list(problems_of(configure(corpus, **fed, **{"moe.shadow": (0,)})))
    assert shadowed == [
        "moe.shadow ((0,)) cannot go with placement.reduce = 'fedavg': rows of a shadowed expert count for "
        "its owner, so shadows would change what each replica learns; set it to 'off'"
    ]
    overlap = {"pipeline.overlap": "pair+self", "data.batch_size": 8}
    (cut,) = problems_of(configure(corpus, **fed, **overlap, **{"pipeline.chunks": 2}))
    assert cut.startswith("pipeline.chunks (2) cannot go with placement.reduce = 'fedavg', which counts rows")
    mesh = Mesh.single()
    assert chunks_of(configure(corpus, **fed, **overlap), mesh) == 1
    assert chunks_of(configure(corpus, **slots, **overlap), mesh) == 2
    for config in (configure(corpus, **slots, **{"moe.shadow": (0,)}), configure(corpus, **fed, **overlap)):
        assert not list(problems_of(config))
