"""A step that is captured and replayed reads what the decoder reads; otherwise it goes on eagerly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from made_run import TINY

from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.model.decode import Decoder, writing
from moeclipse.model.transformer import Transformer
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_alone
from moeclipse.train.config import TrainConfig
from moeclipse.train.generate.decode_graph import DecodeGraph, obstacle
from moeclipse.train.step.graphs import WARM_STEPS


class Recorded:
    """Like a graph of CUDA: a capture computes nothing, a replay does what was captured."""

    def __init__(self, refuses: bool = False) -> None:
        self.refuses, self.done = refuses, []

    def eagerly(self, work: Callable[[], None]) -> None:
        self.done.append("eager")
        work()

    def capture(self, work: Callable[[], None]) -> Any:
        if self.refuses:
            raise RuntimeError("this asks the host\nand more")
        self._work = work
        return self

    def replay(self) -> None:
        self.done.append("replay")
        self._work()


ROWS = [[[5, 2, 9], [7]], [[1], [3]], [[4], [8]], [[2], []], [[6], []], [[6], [1]]]
"""What is read, call by call; the second row pauses."""


def replayed(mesh: Mesh, values: dict[str, Any]) -> list[Any]:
    config = with_values(TrainConfig(), {**TINY, **values})
    model = Transformer(config.model, config.moe, config.gate, mesh=mesh, dtype=torch.float64)
    results = []
    for refuses in (False, True):
        plain, other, capture = (
            Decoder(model, 2, 9, segment=4),
            Decoder(model, 2, 9, segment=4),
            Recorded(refuses),
        )
        graph = DecodeGraph(other, capture)
        with writing(model):
            worst = difference(plain.read(ROWS[0]), other.read(ROWS[0]))
            for new in ROWS[1:]:
                wanted, found = plain.read(new), graph.read(new)
                going = [number for number, row in enumerate(new) if row]
                worst = max(worst, difference(found[going], wanted[going]))
            why = obstacle(plain)
        results.append((worst, capture.done, graph.refused, why))
    return results


def test_replayed_steps_read_what_others_read() -> None:
    for values in ({}, {"model.windows": (3, 0)}, {"model.attention": "mla"}, {"model.memory": 2}):
        captured, refused = run_alone(replayed, values)
        assert captured[0] < 1e-12
        assert captured[1] == ["eager"] * WARM_STEPS + ["replay"] * 3
        assert refused[0] < 1e-12
        assert refused[1] == ["eager"] * 5
        assert refused[2] == "this asks the host"
        assert captured[3] == "there is no CUDA device"
