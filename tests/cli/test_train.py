"""`moeclipse train` up to the moment at which ranks start: words, files, help and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from moeclipse.cli.main import main
from moeclipse.cli.train import (
    Options,
    TrainCommand,
    count_ranks,
    layout_problems,
    name_run,
    read_command,
)
from moeclipse.core.config import flag_layer, flag_of, from_table, keys_of, to_flat, to_toml, with_values
from moeclipse.train.config import TrainConfig
from moeclipse.train.presets import load, merge, preset_names


@pytest.fixture(autouse=True)
def _outside_torchrun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def refused(capsys: pytest.CaptureFixture, *words: str) -> str:
    assert main(["train", *words]) == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    assert captured.out == ""
    return captured.err


def test_print_config_is_the_merged_result(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    Path("mine.toml").write_text('preset = "deepseek-v3-tiny"\n[optim]\nlr = 1e-4\n')
    assert main(["train", "mine.toml", "--print-config", "--data.batch-size", "4"]) == 0
    text = capsys.readouterr().out
    config = from_table(TrainConfig, tomllib.loads(text), "printed")
    assert (config.model.attention, config.optim.lr, config.data.batch_size) == ("mla", 1e-4, 4)
    assert "# Rank of the joint key-value projection (mla)." in text
    assert config == load_of(text)


def load_of(text: str) -> TrainConfig:
    Path("again.toml").write_text(text)
    return load("again.toml")


def test_help_shows_every_key_with_the_value_it_would_have(capsys: pytest.CaptureFixture) -> None:
    Path("mine.toml").write_text("[optim]\nlr = 0.123\n")
    assert main(["train", "mine.toml", "--run.steps", "77", "--help-all"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for key in keys_of(TrainCommand):
        if key == "data.source":  # tables of a file, never a flag
            continue
        assert f"--{key.replace('_', '-')}" in text
    assert "(0.123)" in text
    assert "(77)" in text
    assert "samples per step over all ranks" in text


SAMPLES = {int: ("3", 3), float: ("0.25", 0.25), str: ("abc", "abc")}


def test_flags_mean_what_the_help_says() -> None:
    kinds = {key: kind for key, kind in keys_of(TrainConfig).items() if kind in SAMPLES}
    words = [word for key, kind in kinds.items() for word in (flag_of(key), SAMPLES[kind][0])]
    layer, problems = flag_layer(TrainConfig, words)
    assert not problems
    config = merge(flags=layer).built.config
    assert config is not None
    flat = to_flat(config)
    assert len(kinds) > 100
    assert {key: flat[key] for key in kinds} == {key: SAMPLES[kind][1] for key, kind in kinds.items()}


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (["--data.no-shuffle"], "data.shuffle", False),
        (["--data.shuffle"], "data.shuffle", True),
        (["--data.files", "a", "b"], "data.files", ("a", "b")),
        (["--parallel.ep", "2"], "parallel.ep", 2),
        (["--parallel.ep", "auto"], "parallel.ep", "auto"),
        (["--gate.kind", "sigmoid"], "gate.kind", "sigmoid"),
        (["--model.dtype=float64"], "model.dtype", "float64"),
    ],
)
def test_other_flags_mean_what_the_help_says(words: list[str], key: str, value: object) -> None:
    layer, _ = flag_layer(TrainConfig, words)
    assert merge(flags=layer).built.config == with_values(load(), {key: value})


def test_problems_of_file_flags_and_layout_come_together(capsys: pytest.CaptureFixture) -> None:
    Path("bad.toml").write_text('[gate]\nkind = "sofmax"\ntop_kk = 3\n')
    text = refused(
        capsys, "bad.toml", "--gate.top-k", "9", "--rank", "2", "--ranks", "4", "--parallel.ep", "3"
    )
    assert text.startswith("error: 5 problems:\n")
    assert "gate.kind = 'sofmax': expected one of softmax, sigmoid, switch, gshard, noisy" in text
    assert "gate.top_kk: unknown key; did you mean gate.top_k? (bad.toml)" in text
    assert "gate.top_k (9) must be at most moe.num_experts (8) (gate.top_k from --gate.top-k)" in text
    assert "--rank: unknown flag; did you mean --ranks?" in text
    assert "parallel.ep (3) must divide the number of ranks (4); choose 1, 2, 4" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nix.toml"], "nix.toml: no such file; give the path of a TOML configuration"),
        (
            ["--preset", "tny"],
            f"preset = 'tny': expected one of {', '.join(preset_names())}; did you mean 'tiny'?",
        ),
        (["--ranks", "0"], 'ranks (0) must be at least 1, or "auto"'),
        (["--ranks", "two"], "ranks = 'two': expected a number, two as in 2:4, or \"auto\""),
        (["--restarts", "-1"], "restarts (-1) must not be negative"),
        (["--resume", "nix"], "resume ('nix'): no such path; expected off, auto or a checkpoint's folder"),
        (["--data.files", "nix.txt"], "data.files: 'nix.txt' does not exist"),
        (
            ["--ranks", "2", "--parallel.ep", "3"],
            "parallel.ep (3) must divide the number of ranks (2); choose 1, 2",
        ),
        (["--ranks", "4", "--parallel.dp", "1", "--parallel.ep", "2"], "must equal the number of ranks (4)"),
        (["--gate.top-k", "9"], "gate.top_k (9) must be at most moe.num_experts (8)"),
        (["a.toml", "b.toml"], "b.toml: unexpected"),
    ],
)
def test_bad_input_is_refused_before_any_rank_starts(
    capsys: pytest.CaptureFixture, words: list[str], message: str
) -> None:
    Path("a.toml").write_text("")
    assert message in refused(capsys, "--run.device", "cpu", *words)
    assert not Path("runs").exists()


def runs_with(monkeypatch: pytest.MonkeyPatch, *words: str) -> TrainConfig:
    """The configuration that ranks would get."""
    found: list[TrainConfig] = []
    monkeypatch.setattr("moeclipse.cli.launch.run_rank", lambda config, resume: found.append(config) or 0)
    assert main(["train", *words]) == 0
    return found[0]


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--preset", "deepseek-v3-tiny", "--moe.shadow", "0", "3", "--gate.scale", "1e-30"],
        ["mine.toml", "--placement.slots", "[[0, 1, 2, 3]]", "--run.name", "x y"],
        ["--resume", "auto"],
    ],
)
def test_what_is_printed_is_what_would_run(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    Path("mine.toml").write_text("[moe]\nnum_experts = 4\n[optim]\nlr = 1\n")
    Path("runs/tiny-7").mkdir(parents=True)
    Path("runs/tiny-7/config.toml").touch()
    words = [*words, "--ranks", "1", "--run.device", "cpu"]
    assert main(["train", *words, "--print-config"]) == 0
    printed = load_of(capsys.readouterr().out)
    runs = runs_with(monkeypatch, *words)
    if not printed.run.name:
        assert runs.run.name
        runs = with_values(runs, {"run.name": ""})
    assert printed == runs


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-gate.top-k", "3"], "error: -gate.top-k: unexpected; did you mean --gate.top-k?\n"),
        (["-gate.top-k=3"], "error: -gate.top-k=3: unexpected; did you mean --gate.top-k=3?\n"),
        (["small"], "did you mean --preset small?"),
        (["--moe.shadow", "0", "9"], "moe.shadow names expert 9; experts are 0 to 7"),
        (["--moe.shadow", "on"], "moe.shadow = 'on': expected one of auto, off or a list of whole numbers"),
    ],
)
def test_what_was_meant_is_told(capsys: pytest.CaptureFixture, words: list[str], message: str) -> None:
    assert message in refused(capsys, "--run.device", "cpu", *words)


def test_a_file_may_follow_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("mine.toml").write_text("[run]\nsteps = 7\n")
    for shadow in (["1", "2"], ["auto"]):
        words = ["--run.device", "cpu", "--ranks", "1", "--moe.shadow", *shadow, "mine.toml"]
        config = runs_with(monkeypatch, *words)
        assert config.run.steps == 7
        assert config.moe.shadow == ("auto" if shadow == ["auto"] else (1, 2))


def test_a_broken_file_does_not_hide_wrong_flags(capsys: pytest.CaptureFixture) -> None:
    Path("bad.toml").write_text("[gate\n")
    text = refused(capsys, "bad.toml", "--rnaks", "2")
    assert "bad.toml: not valid TOML:" in text
    assert "line 1" in text
    assert "did you mean --ranks?" in text


def test_an_old_runs_folder_is_not_written_over(capsys: pytest.CaptureFixture) -> None:
    Path("runs/old").mkdir(parents=True)
    Path("runs/old/metrics.jsonl").touch()
    text = refused(capsys, "--run.name", "old", "--run.device", "cpu")
    assert (
        "run directory runs/old exists; continue it with --resume auto, or choose another --run.name" in text
    )


def test_run_name_is_preset_and_time_or_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    merged = merge(None, "small")
    assert name_run(merged, "off", {}).run.name.startswith(f"small-{time.strftime('%Y')}")
    job = {"WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "job-7"}
    assert name_run(merged, "off", job).run.name == "small-job-7"
    assert name_run(merged, "off", job | {"TORCHELASTIC_RUN_ID": "none"}).run.name == ""
    _, named = read_command(["--run.name", "mine"])
    assert name_run(named, "off", job).run.name == "mine"


def test_resume_auto_without_a_name_goes_on_with_the_newest_run() -> None:
    for age, name in enumerate(["tiny-2", "tiny-1", "small-3"]):
        Path("runs", name).mkdir(parents=True)
        file = Path("runs", name, "config.toml")
        file.write_text(to_toml(TrainConfig()))
        os.utime(file, (age, age))
    assert name_run(merge(), "auto", {}).run.name == "tiny-1"


def test_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    problems: list[str] = []
    assert count_ranks("auto", "cpu", problems) == 2
    assert count_ranks(5, "cpu", problems) == 5
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert count_ranks("auto", "auto", problems) == 1
    assert not problems
    count_ranks(2, "auto", problems)
    assert problems.pop().startswith("ranks (2) must be at most the number of CUDA devices (1)")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert count_ranks("auto", "auto", problems) == 2
    count_ranks("auto", "cuda", problems)
    assert problems.pop() == "run.device = 'cuda', but torch sees no CUDA device; use --run.device cpu"


def test_layout_is_not_judged_while_experts_are_wrong() -> None:
    config = merge(flags=flag_layer(TrainConfig, ["--moe.num-experts", "0"])[0]).built.config
    assert not list(layout_problems(config, 2))


def test_no_option_hides_a_section() -> None:
    assert not {field.name for field in fields(Options)} & {field.name for field in fields(TrainConfig)}


def test_a_placement_for_other_ranks_is_refused_before_any_starts() -> None:
    values = {"moe.num_experts": 4, "placement.slots": ((0, 3), (1, 2), (1,))}
    problems = list(layout_problems(with_values(TrainConfig(), values), 2))
    assert problems == ["placement.slots: the placement speaks of 3 ranks, but there are 2"]
    assert not list(layout_problems(with_values(TrainConfig(), values), 6))


def test_init_from_names_a_checkpoint_or_a_model(tmp_path: Path) -> None:
    run, model = tmp_path / "run", tmp_path / "model"
    (run / "checkpoints").mkdir(parents=True)
    model.mkdir()
    (model / "config.json").write_text("{}")
    _, merged = read_command(["--init-from", str(run)])
    assert merged.built.config.run.init_from == str(run)
    _, merged = read_command(["--init-from", str(model)])
    assert merged.built.config.run.init_from == ""
    assert merged.built.config.model.from_hf == str(model)


def test_trace_is_short_for_a_key(capsys: pytest.CaptureFixture) -> None:
    assert read_command(["--trace", "3"])[1].built.config.metrics.trace == 3
    assert read_command([])[1].built.config.metrics.trace == -1
    assert "metrics.trace (-4) must be a step" in refused(capsys, "--trace", "-4")
    told = refused(capsys, "--trace", "5", "--run.steps", "2")
    assert "metrics.trace (5) must be at most run.steps (2)" in told, (
        "a run without a trace would say nothing"
    )


def test_init_from_nowhere(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    told = refused(capsys, "--init-from", "nowhere")
    assert "no such folder; give a checkpoint's, a run's or a model's" in told
    (tmp_path / "checkpoints").mkdir()
    told = refused(capsys, "--init-from", str(tmp_path), "--resume", str(tmp_path))
    assert "continues a run, run.init_from" in told


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ["--resume", "."],
            "resume ('.'): no manifest.json there, so it is no checkpoint; a run goes on",
        ),
        (["--run.dir", "file.txt"], "run.dir (file.txt) is no folder"),
        (["moe.num_experts=4"], "did you mean --moe.num-experts 4?"),
        (["tiny"], "did you mean --preset tiny?"),
        (["run"], "did you mean run/config.toml?"),
    ],
)
def test_what_is_given_for_something_else(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    text: str,
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text("")
    (tmp_path / "file.txt").write_text("")
    monkeypatch.chdir(tmp_path)
    assert text in refused(capsys, *words)


def test_an_adapter_that_is_none(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    told = refused(capsys, "--lora.rank", "2", "--lora.adapter", str(tmp_path), "--run.dir", "runs")
    assert "has no adapter_config.json; give a folder in PEFT's format" in told
    assert not (tmp_path / "runs").exists()


def test_print_memory_is_a_key_of_the_run() -> None:
    _, merged = read_command(["--print-memory"])
    assert merged.built.config.metrics.memory
    _, merged = read_command([])
    assert not merged.built.config.metrics.memory


def test_tune_is_a_key_of_the_run() -> None:
    assert read_command(["--tune"])[1].built.config.run.tune
    assert not read_command([])[1].built.config.run.tune


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--nope", "1"], "--nope: unknown flag"),
        (["--ranks", "2", "--parallel.pp", "3"], "parallel.pp (3) must divide the number of ranks (2)"),
    ],
)
def test_a_mistake_is_answered_before_torch_is_loaded(words: list[str], why: str) -> None:
    """Which takes seconds."""
    code = f"import sys; from moeclipse.cli.main import main; code = main({['train', *words]!r}); "
    code += "print(code, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "False"]
    assert why in done.stderr
