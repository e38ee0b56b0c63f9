"""Texts that are read piece by piece: logits are those of a forward over the whole, in every model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from small_model import GATE, MLA, MODEL, MOE

from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import ConfigError
from moeclipse.model.config import ModelConfig
from moeclipse.model.decode import Decoder, unbounded, writing
from moeclipse.model.segment_memory import memories
from moeclipse.model.transformer import Transformer
from moeclipse.moe.config import GateConfig
from moeclipse.moe.tokens import Tokens
from moeclipse.tensor.parallel import TensorParallel
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_alone, run_ranks
from moeclipse.train.presets import load, preset_names

VARIED = replace(
    MODEL,
    attention_bias="all",
    qk_norm="whole",
    clip_qkv=0.4,
    attention_sinks=True,
    attention_scale=0.7,
    attention_softcap=2.0,
    windows=(3, 0),
    rope_dim=4,
    rope_pairs="neighbours",
    norms="both",
    embedding_scale=1.3,
    residual_scale=0.7,
    logit_scale=0.6,
    logit_softcap=3.0,
)
SCALED = {
    scaling: replace(MODEL, rope_scaling=scaling, rope_factor=4.0, rope_original_len=6)
    for scaling in ("linear", "dynamic", "yarn", "llama3")
}
MODELS = {
    "gqa": MODEL,
    "mla": MLA,
    "varied": VARIED,
    "by-head": replace(VARIED, qk_norm="head", windows=(2,)),
    "mla-varied": replace(MLA, attention_sinks=True, attention_softcap=2.0, windows=(4, 0), q_lora_rank=0),
    **SCALED,
    "mla-dynamic": replace(MLA, rope_scaling="dynamic", rope_factor=4.0, rope_original_len=6),
    "states": replace(
        MODEL,
        num_layers=3,
        mixers=("gated_delta", "kimi_delta", "short_conv"),
        delta_key_dim=3,
        delta_value_dim=5,
        conv_width=3,
    ),
    "gated": replace(
        MODEL,
        mixers=("gated_delta", "attention"),
        attention_gate="component",
        qk_norm="head",
        zero_centred_norms=True,
    ),
    "chunked": replace(
        MODEL,
        chunks=(3, 0),
        rope_layers=(True, False),
        qk_norm="unit",
        growth=0.4,
        growth_len=2,
        growth_first=1,
        growth_in="unturned",
    ),
    "near": replace(MODEL, windows=(3, 0), window_rope_base=70.0, window_rope_dim=4),
    "indexed": replace(MLA, index_topk=3, index_heads=2, index_dim=6),
    "mla-unturned": replace(MLA, rope_layers=(False,), growth=0.4, growth_len=2),
    "norm-dynamic": replace(SCALED["dynamic"], qk_norm="head", rope_magnitude=1.2),
}
TEXTS = ((11, 3), (4, 1), (7, 4))
"""Tokens of each row, and how many of them are its prompt."""
ROUNDS = 9
"""Readings until all rows are read: prompts, then token by token."""
Rows = list[tuple[list[int], int]]


def build(mesh: Mesh, config: ModelConfig, gate: GateConfig = GATE, **tp: Any) -> Transformer:
    """With biases and sinks that matter, the same in every layout."""
    given: dict[str, Any] = {"mesh": mesh, "seed": 3, "dtype": torch.float64}
    model = Transformer(config, MOE, gate, tp=TensorParallel.of(mesh, **tp), **given)
    for name, parameter in model.named_parameters():
        if "bias" in name or "sinks" in name:
            parameter.data.fill_(0.3)
    return model


def texts(vocab_size: int = 40) -> Rows:
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randint(vocab_size, (length,), generator=generator).tolist(), prompt)
        for length, prompt in TEXTS
    ]


def whole(model: Transformer, row: list[int]) -> torch.Tensor:
    """The definition: a forward over the text; of each of its beginnings where its length changes angles."""
    tokens = Tokens(mesh=model.mesh, first=0, total=len(row))
    with writing(model):
        if model.config.rope_scaling != "dynamic":
            return model.logits(model.hidden(torch.tensor([row]), tokens)[0])
        beginnings = [row[: stop + 1] for stop in range(len(row))]
        return torch.stack(
            [model.logits(model.hidden(torch.tensor([part]), tokens)[0])[-1] for part in beginnings]
        )


def piece_by_piece(model: Transformer, rows: Rows, rounds: int = ROUNDS, **given: Any) -> list[torch.Tensor]:
    """Logits of each row from its prompt's last token on."""
    decoder = Decoder(model, len(rows), max([1, *(len(row) for row, _ in rows)]), **given)
    found: list[list[torch.Tensor]] = [[] for _ in rows]
    new = [row[:prompt] for row, prompt in rows]
    with writing(model):
        for _ in range(rounds):
            logits_BV = decoder.read(new)
            for number, row in enumerate(new):
                found[number] += [logits_BV[number]] if row else []
            new = [row[len(text) : len(text) + 1] for (row, _), text in zip(rows, decoder.texts, strict=True)]
    return [torch.stack(row) for row in found]


def worst(model: Transformer) -> float:
    rows = texts(model.config.vocab_size)
    found = piece_by_piece(model, rows)
    wanted = [whole(model, row)[prompt - 1 :] for row, prompt in rows]
    return max(difference(mine, theirs) for mine, theirs in zip(found, wanted, strict=True))


def worst_of_each(mesh: Mesh) -> dict[str, float]:
    return {name: worst(build(mesh, config)) for name, config in MODELS.items()}


def test_logits_are_those_of_a_whole_forward() -> None:
    apart = run_alone(worst_of_each)
    assert apart.keys() == MODELS.keys()
    assert max(apart.values()) < 1e-12, apart


def worst_of_presets(mesh: Mesh) -> dict[str, float]:
    """As they are, but for sizes."""
    small: dict[str, Any] = {"num_layers": 2, "d_model": 16, "d_ff": 20, "vocab_size": 40}
    found = {}
    for name in preset_names():
        config = load(preset=name)
        model = replace(config.model, **small, num_dense_layers=min(config.model.num_dense_layers, 1))
        moe = replace(config.moe, d_ff=6)
        found[name] = worst(Transformer(model, moe, config.gate, mesh=mesh, dtype=torch.float64))
    return found


def test_presets_are_read_piece_by_piece() -> None:
    apart = run_alone(worst_of_presets)
    assert len(apart) >= 7
    assert max(apart.values()) < 1e-12, apart


SPLIT = ("varied", "mla-varied", "dynamic")
"""Models that are cut over ranks, with a vocabulary that does not divide."""


def cut(mesh: Mesh, sequence_parallel: bool = False) -> list[list[torch.Tensor]]:
    """Logits of this rank's rows, for each model; on three ranks the last one has none."""
    results = []
    for name in SPLIT:
        config = replace(MODELS[name], vocab_size=41)
        model, rows = build(mesh, config, sequence_parallel=sequence_parallel), texts()
        if mesh.num_data > 1:
            rows = [rows[:2], rows[2:], []][mesh.data_index]
        if sequence_parallel:
            rows = [*rows, rows[1]]  # as many as tp divides
        results.append(piece_by_piece(model, rows))
    return results


def test_ranks_together_read_what_one_reads() -> None:
    expected = run_alone(cut)
    for sequence_parallel in (False, True):
        for rank in run_ranks(2, cut, sequence_parallel, tp=2):
            for model, wanted in zip(rank, expected, strict=True):
                for mine, theirs in zip(model, wanted, strict=False):
                    assert difference(mine, theirs) < 1e-12
    ranks = run_ranks(3, cut)
    for number, wanted in enumerate(expected):
        found = [row for rank in ranks for row in rank[number]]
        assert len(found) == 3
        assert max(difference(mine, theirs) for mine, theirs in zip(found, wanted, strict=True)) < 1e-12


def with_memory(mesh: Mesh) -> dict[str, float]:
    """Text in segments of 4, whose attention goes back 3 or 6 places before the segment."""
    row, found = texts()[0][0], {}
    for name, config in {"gqa": MODEL, "mla": MLA}.items():
        for memory in (3, 6):
            model = build(mesh, replace(config, memory=memory))
            wanted = []
            for first in range(0, len(row), 4):  # as in training: layers remember between steps
                part = torch.tensor([row[first : first + 4]])
                with torch.no_grad():
                    tokens = Tokens(mesh=mesh, first=0, total=part.numel())
                    wanted.append(model.logits(model.hidden(part, tokens)[0]))
                for layer in memories(model):
                    layer.turn()
            prompts = [(row, prompt) for prompt in (1, 3, 4, 9)]
            mine = piece_by_piece(model, prompts, 11, segment=4)
            for (_, prompt), logits_SV in zip(prompts, mine, strict=True):
                found[f"{name} {memory} {prompt}"] = difference(logits_SV, torch.cat(wanted)[prompt - 1 :])
    return found


def test_memory_goes_back_as_far_as_in_training() -> None:
    apart = run_alone(with_memory)
    assert len(apart) == 16
    assert max(apart.values()) < 1e-12, apart


BOUNDED = GateConfig(top_k=2, capacity_factor=0.5, overflow="drop", renormalise_kept=True, min_capacity=1)


def neighbours(mesh: Mesh) -> tuple[float, float, bool, list[bool]]:
    """(difference that a neighbour makes, that bounds would make, whether the model is as before)."""
    model, rows = build(mesh, MODEL, BOUNDED), texts()
    gates = [layer.moe.gate for layer in model.layers.values()]
    together, alone = piece_by_piece(model, rows), piece_by_piece(model, rows[:1])
    free = build(mesh, MODEL, unbounded(BOUNDED))
    same = max(difference(together[0], alone[0]), difference(together[0], piece_by_piece(free, rows)[0]))
    tokens = Tokens(mesh=mesh, first=0, total=11)
    with torch.no_grad():
        bounded = model.logits(model.hidden(torch.tensor([rows[0][0]]), tokens)[0])
    restored = model.training and all(gate.config is BOUNDED for gate in gates)
    return same, difference(bounded, whole(model, rows[0][0])), restored, [torch.is_grad_enabled()]


def test_a_text_does_not_depend_on_its_neighbours() -> None:
    same, bounds_matter, restored, grad = run_alone(neighbours)
    assert same < 1e-12
    assert bounds_matter > 1e-6
    assert restored
    assert grad == [True]


def odd_calls(mesh: Mesh) -> list[str]:
    model, said = build(mesh, MODEL), []

    def refused(work: Any) -> None:
        with pytest.raises(ConfigError) as caught:
            work()
        said.append(str(caught.value))

    with writing(model):
        decoder = Decoder(model, 1, 2)
        refused(lambda: decoder.read([[1], [2]]))
        decoder.read([[1, 2]])
        decoder.read([[]])  # nothing new: nobody fails, and nothing is forgotten
        refused(lambda: decoder.read([[3]]))
        assert Decoder(model, 0, 2).read([]).shape == (0, 40)
    refused(lambda: Decoder(build(mesh, replace(MODEL, memory=2)), 1, 8))
    stage = Transformer(MODEL, MOE, GATE, mesh=mesh, held=[0])
    refused(lambda: Decoder(stage, 1, 8))
    return said


def test_what_a_decoder_refuses() -> None:
    rows, long, segment, stage = run_alone(odd_calls)
    assert rows == "tokens for 2 rows, but the decoder has 1"
    assert long == "a row of 3 tokens is longer than the decoder's 2"
    assert "give the length of one" in segment
    assert "some layers of a pipeline" in stage
