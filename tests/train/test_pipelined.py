"""Every schedule and overlap mode gives the gradients of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_learner import LATENT, configure, gradients, join

from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_alone, run_ranks

BOUND = 1e-12
MODELS: dict[str, dict[str, Any]] = {
    "softmax": {"gate.balance_loss": 0.05, "gate.z_loss": 0.01},
    "latent": {**LATENT, "model.num_layers": 3},
}
BASE = {"optim.accumulate": 4, "data.batch_size": 18, "model.num_layers": 4}


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text(Path(__file__).read_text()[:4000])
    return str(path)


def check(corpus: str, ranks: int, changes: dict[str, Any], layout: dict[str, int]) -> None:
    plain = configure(corpus, **{**changes, "pipeline.overlap": "off", "pipeline.schedule": "auto"})
    expected = join([run_alone(gradients, plain)])
    results = run_ranks(ranks, gradients, configure(corpus, **changes), **layout)
    found = join(results)
    assert set(found) == set(expected)
    worst = {name: difference(found[name], expected[name]) for name in expected}
    assert max(worst.values()) < BOUND, sorted(worst.items(), key=lambda item: -item[1])[:5]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("overlap", ["off", "pair", "pair+self"])
@pytest.mark.parametrize("ep", [1, 2])
def test_pairs_of_microbatches_on_one_stage(corpus: str, model: str, overlap: str, ep: int) -> None:
    changes = {**BASE, **MODELS[model], "pipeline.overlap": overlap, "pipeline.schedule": "auto"}
    if overlap == "off":
        changes["pipeline.schedule"] = "1f1b"
    check(corpus, ep, changes, {})


SCHEDULES = ["gpipe", "1f1b", "1f1b-pairs", "vpp", "vpp+1", "zb-h1", "zb-v", "dualpipev"]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("overlap", ["off", "pair+self"])
@pytest.mark.parametrize("tied", [False, True])
def test_stages_over_ranks(corpus: str, schedule: str, overlap: str, tied: bool) -> None:
    changes = {**BASE, **MODELS["softmax"], "model.tie_embeddings": tied}
    changes |= {"pipeline.overlap": overlap, "pipeline.schedule": schedule}
    check(corpus, 4, changes, {"pp": 2})
