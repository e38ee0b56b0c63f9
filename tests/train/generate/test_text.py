"""Text from models: the same alone and in company, at every layout, from every kind of folder."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from made_run import TINY, make_run

from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import to_toml, with_values
from moeclipse.core.errors import CheckpointError, ConfigError, DataError
from moeclipse.testing.run_ranks import run_alone, run_ranks
from moeclipse.train.config import TrainConfig
from moeclipse.train.generate.text import GenerateConfig, LanguageModel, load_model
from moeclipse.train.weights.open_model import find_model, load_into, parameters_by_name, plain

PROMPTS = ["ab", "c", "defgh"]
OPTIONS: dict[str, Any] = {"max_tokens": 6, "temperature": 0.7, "top_k": 50, "seed": 3}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("run")
    run_alone(make_run, root, {})
    return root / "run"


def texts(mesh: Mesh, path: Path, prompts: list[str], options: dict[str, Any]) -> list[str]:
    return load_model(str(path), mesh=mesh, peer="off").generate(prompts, **options)


def calls(mesh: Mesh, path: Path) -> dict[str, Any]:
    """One model, called in many ways."""
    model = load_model(str(path))
    expected = model.generate(PROMPTS, **OPTIONS)
    ended = {piece.row: piece.ended for piece in model.stream(PROMPTS, **OPTIONS) if piece.ended}
    stream = model.stream("ab", **OPTIONS)
    next(stream)
    between = torch.is_grad_enabled()  # while a text waits, the caller is as before
    stopped = model.generate("ab", **OPTIONS | {"stop": expected[0][2]})
    again, alone = model.generate(PROMPTS, **OPTIONS), model.generate("ab", **OPTIONS)
    one = model.generate("ab", **OPTIONS | {"max_tokens": 1})
    other = model.generate(PROMPTS, **OPTIONS | {"seed": 4})
    model.ends = frozenset(model.vocabulary.encode(expected[0][3])[:1])
    return {
        "expected": expected,
        "again": again,
        "alone": alone,
        "one": one,
        "none": model.generate(PROMPTS, max_tokens=0),
        "other": other,
        "stopped": stopped,
        "ends": [(piece.text, piece.ended) for piece in model.stream("ab", **OPTIONS)],
        "ended": ended,
        "between": between,
        "surest": model.generate(PROMPTS, max_tokens=6, temperature=0),
        "surest alone": [model.generate(prompt, max_tokens=6, temperature=0)[0] for prompt in PROMPTS],
        "late": [piece.ended for piece in model.stream("ab", until=time.monotonic() - 1, max_tokens=9)],
    }


def test_a_text_is_the_same_in_every_company(run: Path) -> None:
    found = run_alone(calls, run)
    expected = found["expected"]
    assert found["again"] == expected
    assert found["alone"] == expected[:1]
    assert found["surest"] == found["surest alone"]
    assert len(set(found["surest"])) == 3
    assert found["other"] != expected
    assert expected[0].startswith(found["one"][0].rstrip("\ufffd"))
    assert found["none"] == ["", "", ""]
    assert found["ended"] == {0: "length", 1: "length", 2: "length"}
    assert found["between"]
    assert found["stopped"] == [expected[0].split(expected[0][2])[0]]
    assert found["ends"][-1][1] in ("end", "length")
    assert found["late"] == ["time"]
    # One prompt fewer than ranks, and heads, vocabulary and dense layers cut.
    for ranks in (
        run_ranks(2, texts, run, PROMPTS, OPTIONS),
        run_ranks(2, texts, run, PROMPTS, OPTIONS, tp=2),
    ):
        assert ranks == [expected, expected]
    assert run_ranks(2, texts, run, PROMPTS[:1], OPTIONS) == [expected[:1]] * 2


def weights(mesh: Mesh, path: Path) -> list[tuple[str, int, torch.Tensor]]:
    model = load_model(str(path), mesh=mesh, peer="off").model
    return [
        (entry.name, entry.start, parameter.view(-1)[entry.offset : entry.offset + entry.numel].clone())
        for parameter, entries in parameters_by_name(model)
        for entry in entries
    ]


def test_each_layout_reads_the_weights_it_holds(run: Path) -> None:
    whole = {name: data for name, _, data in run_alone(weights, run)}
    for rank in run_ranks(2, weights, run, tp=2):
        for name, start, data in rank:
            key = name.partition("[")[0]
            if key == name:
                assert torch.equal(whole[key][start : start + len(data)], data)
    assert callable(load_into)


def odd_folders(mesh: Mesh, root: Path) -> list[str]:
    said = []
    for path in (root / "none", root, root / "run"):
        with pytest.raises((ConfigError, CheckpointError)) as caught:
            load_model(str(path))
        said.append(str(caught.value))
    return said


def test_what_is_no_model_is_told_in_one_line(tmp_path: Path, run: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "config.toml").write_text(to_toml(with_values(TrainConfig(), TINY)))
    nowhere, nothing, empty = run_alone(odd_folders, tmp_path)
    assert "there is no such folder" in nowhere
    assert "neither a run" in nothing
    assert empty.endswith("has no whole checkpoint")
    for name, config, why in (
        ("tokens", {"data.files": ("a.bin",)}, "trained on files of tokens"),
        ("small", {"model.vocab_size": 200, "data.files": ("a.txt",)}, "too small for bytes"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").write_text(to_toml(with_values(TrainConfig(), {**TINY, **config})))
        with pytest.raises(ConfigError, match=why):
            find_model(tmp_path / name).vocabulary()
    with pytest.raises(DataError, match="does not exist"):
        find_model(run).vocabulary("missing.json")
    (checkpoint,) = (run / "checkpoints").iterdir()
    assert find_model(checkpoint).path == checkpoint
    assert find_model(run).context == 32
    shapes = find_model(run).shapes
    assert plain(shapes) == shapes


def refusals(mesh: Mesh, path: Path) -> list[str]:
    model, said = load_model(str(path)), []
    for prompts, options in (
        ([], {}),
        ([""], {}),
        (["x" * 33], {}),
        (["x" * 30], {"max_tokens": 3}),
        (["x"], {"max_tokens": -1}),
        (["x"], {"stop": ("",)}),
        (["x"], {"top_kk": 3}),
    ):
        with pytest.raises(ConfigError) as caught:
            model.stream(prompts, **options)
        said.append(str(caught.value))
    assert len(model.generate("x" * 30, max_tokens=3, context=40, temperature=0)) == 1
    return said


def test_bad_input_is_told_in_one_line(run: Path) -> None:
    said = run_alone(refusals, run)
    assert not any("\n" in line for line in said)
    none, empty, long, longer, negative, stop, unknown = said
    assert "there is no prompt" in none
    assert "prompt 1 is empty" in empty
    assert "a prompt of 33 tokens is more than the 32 tokens" in long
    assert "a prompt of 30 tokens and max_tokens (3)" in longer
    assert "max_tokens (-1)" in negative
    assert "empty string" in stop
    assert "no option 'top_kk'" in unknown
    assert GenerateConfig().max_tokens == "auto"
    assert LanguageModel.generate.__doc__
