"""A step that is captured and replayed reads what the decoder reads; otherwise it goes on eagerly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from made_run import TINY

from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.model.decode import Decoder, writing
from moeclipse.model.transformer import Transformer
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_alone
from moeclipse.train.config import TrainConfig
from moeclipse.train.data.vocabulary import ByteVocabulary
from moeclipse.train.generate import text
from moeclipse.train.generate.decode_graph import DecodeGraph, obstacle, room_for
from moeclipse.train.generate.text import GenerateConfig, LanguageModel
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


PROMPTS = [[5, 2, 9], [7]]


def written(model: LanguageModel, prompts: list[list[int]], tokens: int = 6) -> str:
    config = GenerateConfig(max_tokens=tokens, temperature=0.0)
    return "|".join(f"{piece.row}{piece.text}" for piece in model.stream_tokens(prompts, config))


def graphs_of_calls(mesh: Mesh) -> None:
    """The same graph for texts of one size, and none that another call, or another weight, made stale."""
    config = with_values(TrainConfig(), TINY)
    inner = Transformer(config.model, config.moe, config.gate, mesh=mesh, dtype=torch.float64)
    inner.requires_grad_(False)
    plain = LanguageModel(inner, ByteVocabulary())
    wanted, other = written(plain, PROMPTS), written(plain, [[8, 8]])
    assert plain._graph is None, "there is no CUDA device"
    text.obstacle = lambda _: ""
    captures: list[Recorded] = []

    def capture(_: torch.device) -> Recorded:
        captures.append(Recorded())
        return captures[-1]

    text.CudaCapture = capture
    model = LanguageModel(inner, ByteVocabulary())
    assert written(model, PROMPTS) == wanted
    assert written(model, PROMPTS) == wanted
    assert len(captures) == 1
    assert captures[0].done == ["eager"] * WARM_STEPS + ["replay"] * (5 - WARM_STEPS + 5)
    assert written(model, [[8, 8]]) == other, "another number of texts"
    assert len(captures) == 2
    assert written(model, PROMPTS) == wanted
    assert len(captures) == 3

    config = GenerateConfig(max_tokens=6, temperature=0.0)
    turns = [model.stream_tokens(PROMPTS, config) for _ in range(2)]
    pairs = list(zip(*turns, strict=True))
    assert all(one == two for one, two in pairs), "two calls at once have a graph each"
    assert len(captures) == 4

    next(model.stream_tokens(PROMPTS, config)), "left behind in the middle"
    assert written(model, PROMPTS) == wanted
    before = len(captures)
    inner.norm.weight.data = 2 * inner.norm.weight.data
    changed = written(plain, PROMPTS)
    assert written(model, PROMPTS) == changed
    assert len(captures) == before + 2, "weights that lie elsewhere, here for both of them"

    inner.requires_grad_(True)
    assert written(model, PROMPTS) == changed
    assert model._graph is None, "what is trained keeps its memory for training"


def test_a_graph_serves_the_next_texts() -> None:
    run_alone(graphs_of_calls)


@pytest.mark.parametrize(("length", "room"), [(1, 256), (256, 256), (257, 512)])
def test_texts_of_many_lengths_share_a_graph(length: int, room: int) -> None:
    assert room_for(length) == room
