"""What a rank would refuse is refused by the configuration, in sentences that name keys; the rest is built.

`problems_of` is all that stands between a user and ranks that start. It must never raise itself, whatever it
is given, and where it says nothing every rank must be able to build all that it trains.
"""

from __future__ import annotations

import math
import random
import types
import typing
from pathlib import Path
from typing import Any

import pytest
from test_learner import configure, corpus  # noqa: F401  (a fixture)

from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import build, flag_layer, keys_of, named_in, problems_of, to_flat, with_values
from moeclipse.core.errors import ConfigError
from moeclipse.core.values import convert
from moeclipse.testing.run_ranks import run_ranks
from moeclipse.train.config import TrainConfig, layout_problems
from moeclipse.train.observe.metrics_config import NO_TENSORBOARD
from moeclipse.train.run.trainer import train
from moeclipse.train.step.learner import Learner

KEYS = keys_of(TrainConfig)
BUSY: dict[str, Any] = {
    "parallel.pp": 2,
    "parallel.tp": 2,
    "parallel.ep": 2,
    "pipeline.schedule": "1f1b",
    "pipeline.overlap": "pair+self",
    "optim.accumulate": 4,
    "data.order": "stream",
    "model.memory": 4,
    "placement.planner": "incremental",
    "moe.schedule": "smart",
    "moe.expert_tp": "sharded",
}
WRONG: list[Any] = [math.nan, None]
HOSTILE: list[Any] = [0, -1, 10**15, 1e300, "", "\0", (), ((),), (10**9,), True, *WRONG]
FEW: list[Any] = [0, -1, 10**15, math.nan]


# --- whatever is given, there are sentences ----------------------------------------------------------------


@pytest.mark.parametrize("key", KEYS)
def test_hostile_values_give_sentences_that_name_the_key(key: str) -> None:
    sentences_name(key, {}, HOSTILE)


@pytest.mark.full
@pytest.mark.parametrize("key", KEYS)
def test_hostile_values_beside_many_others(key: str) -> None:
    sentences_name(key, BUSY, FEW)


def sentences_name(key: str, base: dict[str, Any], values: list[Any]) -> None:
    for value in values:
        if key == "model.from_hf" and isinstance(value, str) and value:  # a folder that is not there
            with pytest.raises(ConfigError, match=key):
                with_values(TrainConfig(), {**base, key: value})
            continue
        config = with_values(TrainConfig(), {**base, key: value})
        told = list(problems_of(config))
        list(layout_problems(config, 8))
        for sentence in told:
            assert key in named_in(sentence, KEYS), (value, sentence)
        if any(value is wrong for wrong in WRONG):
            assert told, f"{key} = {value!r} is accepted"


def test_every_default_is_of_its_type() -> None:
    """A value that is the default is not converted."""
    flat = to_flat(TrainConfig())
    for key, kind in KEYS.items():
        assert convert(flat[key], kind) == flat[key], key


def test_the_busy_configuration_is_sound() -> None:
    """Otherwise what is told about a hostile value might be told without it."""
    assert not list(problems_of(with_values(TrainConfig(), BUSY)))


@pytest.mark.parametrize("key", [key for key in KEYS if KEYS[key] is int])
def test_a_text_is_no_number(key: str) -> None:
    assert list(problems_of(with_values(TrainConfig(), {key: "2"}))) == [
        f"{key} = '2': expected a whole number"
    ]


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"model.rope_base": 0.0}, "model.rope_base (0.0) must be positive"),
        (
            {"model.attention": "mla", "model.q_lora_rank": -1},
            "model.q_lora_rank (-1) must not be negative; 0 is full rank",
        ),
        (
            {"parallel.start_deadline_s": 1e300},
            "parallel.start_deadline_s (1e+300) must be positive and at most 1e+09 seconds",
        ),
        (
            {"data.files": ("",)},
            "data.files holds an empty name; give paths or globs of files, or an empty list",
        ),
        (
            {"run.name": "a\nb"},
            "run.name ('a\\nb') must be a plain folder name; the folder above it is run.dir",
        ),
    ],
)
def test_ranges(values: dict[str, Any], told: str) -> None:
    assert list(problems_of(with_values(TrainConfig(), values))) == [told]


def test_a_package_that_is_missing_is_told_before_ranks_start(monkeypatch: pytest.MonkeyPatch) -> None:
    config = with_values(TrainConfig(), {"metrics.tensorboard": True})
    monkeypatch.setattr("moeclipse.train.observe.metrics_config.find_spec", lambda name: None)
    assert list(problems_of(config)) == [NO_TENSORBOARD]


# --- one rule, two callers ---------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "padded units": (
        {"gate.overflow": "pad", "gate.capacity_factor": 1.0, "moe.schedule": "smart"},
        "gate.overflow = 'pad' needs moe.schedule = 'blocking'",
    ),
    "a stage without experts": (
        {"placement.planner": "greedy", "model.num_dense_layers": 2},
        "placement.planner = 'greedy' needs a layer with experts in every stage, but rank 0 of the pipeline",
    ),
    "too few layers": (
        {"model.num_layers": 3, "pipeline.schedule": "zb-v"},
        "makes 4 stages, but model.num_layers is 3",
    ),
    "too few microbatches": ({"pipeline.schedule": "dualpipev"}, "at least two microbatches per rank"),
    "experts that two ranks would move": (
        {"pipeline.schedule": "dualpipe", "placement.planner": "greedy", "optim.accumulate": 4},
        "two ranks of the pipeline hold each layer and would have to move its experts together",
    ),
}


def refusals(mesh: Mesh, configs: list[TrainConfig]) -> list[str]:
    """What the constructors say, one after the other."""
    found = []
    for config in configs:
        try:
            Learner(config, mesh)
            found.append("")
        except ConfigError as error:
            found.append(str(error))
    return found


def test_what_a_rank_refuses_the_configuration_refuses_in_the_same_words(corpus: str) -> None:  # noqa: F811
    stages = {"parallel.pp": 2, "model.num_layers": 4, "optim.accumulate": 2}
    configs = [configure(corpus, **{**stages, **changes}) for changes, _ in REFUSED.values()]
    for told in run_ranks(2, refusals, configs, pp=2):
        for (_, words), config, text in zip(REFUSED.values(), configs, told, strict=True):
            known = "; ".join(problems_of(with_values(config, {"parallel.ep": 1})))
            assert words in known, (words, known)
            assert words in text, (words, text)


def test_what_cannot_be_cut_over_ranks(corpus: str) -> None:  # noqa: F811
    fits = {"parallel.tp": 2, "parallel.ep": 1, "model.num_kv_heads": 2}
    narrow: list[dict[str, Any]] = [
        {"model.num_kv_heads": 1},
        {"moe.expert_tp": "sharded", "moe.d_ff": 1},
        {"moe.expert_tp": "sharded", "moe.num_shared_experts": 1, "moe.shared_d_ff": 1},
        {"moe.expert_tp": "sharded", "moe.expert_bias": True},
        {"model.num_dense_layers": 1, "model.d_ff": 1},
    ]
    configs = [configure(corpus, **{**fits, **changes}) for changes in narrow]
    for config in configs:
        assert all("parallel.tp (2)" in told for told in problems_of(config))
        assert list(problems_of(config))
    assert not list(problems_of(configure(corpus, **fits)))
    for told in run_ranks(2, refusals, configs, tp=2):
        assert all(told), told


def test_tables_for_fewer_layers_than_there_are(corpus: str) -> None:  # noqa: F811
    """Ranks of a pipeline that hold the first layers alone would not even see it."""
    tables = '{"layers": [[[0, 1, 2, 3, 4]], [[0, 1, 2, 3, 4]]]}'
    config = configure(corpus, **{"placement.slots": tables, "model.num_layers": 3})
    (told,) = problems_of(config)
    assert told.startswith("placement.slots holds 2 layers, but the model has at least 3 with experts")
    assert refusals(Mesh.single(), [config]) == [told]


def test_what_depends_on_the_number_of_ranks_is_refused_before_they_meet(
    corpus: str,  # noqa: F811
    tmp_path: Path,
) -> None:
    values = {"placement.slots_per_rank": 2, "run.dir": str(tmp_path), "run.name": "never"}
    config = configure(corpus, **values)
    assert not list(problems_of(config))
    assert not list(layout_problems(config, 3))
    with pytest.raises(ConfigError, match=r"slots_per_rank \(2\) is too small: 5 experts"):
        train(config)
    assert not any(tmp_path.iterdir())


def test_what_works_is_not_refused(corpus: str) -> None:  # noqa: F811
    works: list[dict[str, Any]] = [
        {"moe.expert_bias": True, "moe.expert_tp": "sharded"},
        {"model.num_dense_layers": 2, "gate.top_k": 9, "placement.slots": ((9, 9),)},
    ]
    for changes in works:
        config = configure(corpus, **changes)
        assert not list(problems_of(config)), changes
        assert math.isfinite(Learner(config, Mesh.single()).step(0)["loss"])


# --- whatever is accepted can be built ---------------------------------------------------------------------

OF_THE_MACHINE: dict[str, Any] = {"run.device": "cpu", "parallel.peer": "auto", "metrics.tensorboard": False}
OF_THE_DATA = (
    *("data.files", "data.tokenizer", "data.token_dtype", "model.vocab_size", "run.dir"),
    *("data.source", "data.end_of_text", "eval.files"),
)


def draw(kind: Any, rng: random.Random) -> Any:
    """A value of a type, small enough to be built."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return rng.choice([arg for arg in args if arg not in ("peer", "pinned")])
    if origin in (types.UnionType, typing.Union):
        return draw(rng.choice(args), rng)
    if origin is tuple:
        return tuple(draw(args[0], rng) for _ in range(rng.randint(0, 3)))
    choices: dict[Any, list[Any]] = {
        bool: [False, True],
        int: [0, 1, 2, 3, 4, 6, 8],
        float: [0.0, 0.1, 0.5, 1.0, 2.0, 1e-3],
        str: ["", "x"],
    }
    return rng.choice(choices[kind])


def valid_configs(path: str, seeds: range, num_ranks: int, **axes: Any) -> list[TrainConfig]:
    """Random configurations that nothing complains about, on so many ranks."""
    free = sorted(set(KEYS) - set(OF_THE_MACHINE) - set(OF_THE_DATA) - set(axes) - {"model.from_hf"})
    found = []
    for seed in seeds:
        rng = random.Random(seed)
        values = {"model.num_layers": 4, "model.num_kv_heads": 2, "optim.accumulate": 2}
        values |= {key: draw(KEYS[key], rng) for key in rng.sample(free, rng.randint(2, 16))}
        config = configure(path, **{**values, **OF_THE_MACHINE, **axes})
        if not list(problems_of(config)) and not list(layout_problems(config, num_ranks)):
            found.append(config)
    assert len(found) >= len(seeds) // 8, "too few of them are valid: the test says nothing"
    return found


def test_what_is_accepted_can_be_built_by_one_rank(corpus: str) -> None:  # noqa: F811
    configs = valid_configs(corpus, range(60), 1)
    assert refusals(Mesh.single(), configs) == [""] * len(configs)


LAYOUTS: dict[str, dict[str, int]] = {"ep": {}, "pp": {"pp": 2}, "tp": {"tp": 2}}


def check_two_ranks(path: str, layout: dict[str, int], seeds: range) -> None:
    axes: dict[str, Any] = {"parallel.pp": 1, "parallel.tp": 1, "parallel.dp": "auto"}
    axes |= {f"parallel.{axis}": size for axis, size in layout.items()}
    axes["parallel.ep"] = 1 if layout else 2
    configs = valid_configs(path, seeds, 2, **axes)
    for told in run_ranks(2, refusals, configs, **layout):  # type: ignore[arg-type]
        assert told == [""] * len(configs)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_what_is_accepted_can_be_built_by_two_ranks(corpus: str, layout: dict[str, int]) -> None:  # noqa: F811
    check_two_ranks(corpus, layout, range(1000, 1030))


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_much_that_is_accepted_can_be_built_by_two_ranks(corpus: str, layout: dict[str, int]) -> None:  # noqa: F811
    for first in range(2000, 2800, 100):
        check_two_ranks(corpus, layout, range(first, first + 100))


@pytest.mark.full
def test_much_that_is_accepted_can_be_built_by_one_rank(corpus: str) -> None:  # noqa: F811
    configs = valid_configs(corpus, range(5000, 6500), 1)
    assert refusals(Mesh.single(), configs) == [""] * len(configs)


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["--run.deterministic"], True),  # as with version 0.1
        (["--run.no-deterministic"], False),
        (["--run.deterministic", "auto"], "auto"),
        (["--run.deterministic", "my.toml"], True),
        ([], "auto"),
    ],
)
def test_equal_bits_are_asked_for_in_one_word(words: list[str], value: object) -> None:
    layer, problems = flag_layer(TrainConfig, words, positional="file")
    built = build(TrainConfig, [{key: given for key, given in layer.items() if key != "file"}])
    assert (problems, built.config.run.deterministic) == ([], value)
    assert ("file" in layer) is (words[-1:] == ["my.toml"])
