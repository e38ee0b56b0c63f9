"""`moeclipse plan`: the table, one plan explained, the file, and what is refused in one sentence."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from moeclipse.cli.main import main
from moeclipse.cli.plan import MEDIAN_ERROR, loses_by, seconds_text, split_flags, tokens_in, usual_tokens
from moeclipse.plan.layout import Layout
from moeclipse.plan.published import ROWS
from moeclipse.plan.question import Plan
from moeclipse.plan.step import StepTime
from moeclipse.train.presets import load

BASE = [
    "plan",
    "--model",
    "qwen3-30b-a3b",
    "--gpus",
    "16",
    "--tokens-per-step",
    "131072",
    "--seq-len",
    "2048",
]


def test_ten_plans_one_explained_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "best.toml"
    assert main([*BASE, "--device", "h200", "--explain", "2", "-o", str(out), "--width", "60"]) == 0
    text = capsys.readouterr().out
    assert "30.5 B parameters, 16 GPUs (h200, 8 a node), 64 x 2,048 tokens a step" in text
    rows = [line for line in text.splitlines() if ", recompute " in line and "%" in line]
    assert len(rows) == 10
    steps = [float(row.split()[1]) for row in rows]
    assert steps == sorted(steps)
    rate, share = (float(text.strip("%").replace(",", "")) for text in rows[0].split()[3:5])
    flops = 6 * 3.04e9 + 6 * 48 * 32 * 256 * 1024  # weights that a token meets, and keys that it sees
    assert share / 100 == pytest.approx(rate * flops / 989e12, rel=0.02)
    assert rate == pytest.approx(64 * 2048 / 16 / steps[0] * (1 if " s " in rows[0] else 1e3), rel=0.02)
    assert "tokens/s/GPU" in text
    assert "behind the best by" in text
    assert "layout: pp stages, dp copies" in text
    assert "1 to " in text, "some differ by less than predictions are off"
    assert "--page FILE: a page for a browser" in text
    assert "--explain N" not in text, "it was asked"
    assert "peak GiB by stage rank:" in text
    assert "attention" in text
    assert "written to" in text
    config = load(out)
    layout = rows[1].partition("pp")[2]
    assert layout.startswith(f"{config.parallel.pp} dp{config.parallel.dp} ep{config.parallel.ep}")
    assert config.data.batch_size == 64


def test_keys_of_the_configuration_are_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Adapters need a third of the memory that all of the model needs, and their file says what they are."""
    out, common = tmp_path / "best.toml", ["plan", "qwen3-30b-a3b", "--gpus", "1", "--seq-len", "2048"]
    common += ["--tokens-per-step", "16k", "--device", "h200"]
    assert main([*common]) == 1, "30 B parameters with all that is trained"
    adapters = ["--lora.rank", "16", "--lora.targets", "q", "v"]
    assert main([*common, *adapters, "-o", str(out)]) == 0
    assert load(out).lora.targets == ("q", "v")
    narrow = ["--lora.rank", "16", "--model.base", "nf4", "--model.dense-base", "nf4"]
    assert main([*common, *narrow]) == 0
    away = [*narrow, "--memory.weights", "host", "--pipeline.recompute", "full"]
    assert main([*common, *away]) == 0
    capsys.readouterr()
    assert main([*common, *away, "--gpus", "2"]) == 2
    assert "memory.weights = 'host' needs one GPU, not 2" in capsys.readouterr().err
    assert main([*common, "--lora.ranks", "16"]) == 2
    assert "--lora.ranks: unknown flag; did you mean --lora.rank?" in capsys.readouterr().err


def test_a_file_brings_its_own_batch_and_a_cluster_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, cables = tmp_path / "mine.toml", tmp_path / "cluster.toml"
    file.write_text('preset = "small"\n')
    cables.write_text('device = "a100"\ngpus_per_node = 4\n')
    assert main(["plan", str(file), "--gpus", "4", "--device", str(cables)]) == 0
    config = load(preset="small")
    told = f"4 GPUs (a100, 4 a node), {config.data.batch_size} x {config.data.seq_len} tokens"
    assert told in capsys.readouterr().out


def test_whoever_names_no_batch_gets_a_usual_one_and_a_preset_its_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert [usual_tokens(gpus) / 1024**2 for gpus in (8, 64, 256, 2048)] == [0.5, 4, 4, 16]
    assert main(["plan", "qwen3-30b-a3b", "--gpus", "8", "--seq-len", "8192", "--lora.rank", "8"]) == 0
    assert "64 x 8,192 tokens a step" in capsys.readouterr().out
    assert main(["plan", "tiny", "--gpus", "2"]) == 0
    tiny = load(preset="tiny").data
    assert f"{tiny.batch_size} x {tiny.seq_len} tokens a step" in capsys.readouterr().out


def test_state_on_the_host_is_told_whole(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "qwen3-30b-a3b", "--gpus", "4", "--tokens-per-step", "64k", "--optim.main-grad", "bf16"]
    assert main([*asked, "--device", "h200"]) == 0
    text = capsys.readouterr().out
    assert "\u2026" not in text, "nothing is cut off"
    rows = [line for line in text.splitlines() if ", recompute " in line and ", host " in line]
    assert rows
    assert "host GiB" in text
    assert "that lies in the host's memory" in text
    assert main([*asked, "--device", "h200", "--optim.state", "8bit", "--gpus", "8"]) == 0
    text = capsys.readouterr().out
    assert ("host GiB" in text) == (", host " in text)


def test_where_nothing_fits_the_status_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "qwen3-30b-a3b", "--gpus", "2", "--tokens-per-step", "64k"]) == 1
    text = capsys.readouterr().out
    assert "nothing fits: the nearest is" in text
    assert "it would fit on" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "say which model to plan, once"),
        (["tiny", "--model", "tiny"], "say which model to plan, once"),
        (["tiny", "--gpus", "0"], "--gpus (0) must be at least 1"),
        (["tiny", "--seq-len", "-1"], "--seq-len (-1) must not be negative"),
        (["tiny", "--imbalance", "0.5"], "--imbalance (0.5) must be at least 1"),
        (["tiny", "--explain", "-1"], "--explain (-1) must be the number"),
        (["tiny", "--dtype", "fp8", "-o", "x.toml"], "--out cannot go with --dtype fp8"),
        (["tiny", "--tokens-per-step", "many"], "must be a number like"),
        (["tiny", "--tokens-per-step", "0"], "must be a number like"),
        (["tiny", "--tokens-per-step", "1M", "--device", "h10"], "did you mean 'h100'"),
        (["nothing", "--tokens-per-step", "1M"], "give a TOML file"),
        (["tiny", "--tokens-per-step", "64k", "--explain", "99"], "there are plans 1 to"),
        (
            ["tiny", "--tokens-per-step", "28k", "--seq-len", "4096", "--gpus", "64"],
            "no layout divides 64 GPUs and 7 sequences",
        ),
    ],
)
def test_bad_input_is_one_sentence(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["plan", *words])
    told = capsys.readouterr()
    assert message in told.out + told.err
    assert code in (1, 2)
    assert told.err.count("\n") <= 1


def test_numbers_of_tokens() -> None:
    assert [tokens_in(text) for text in ("63M", "500k", "4_194_304", "1.5g", "2B")] == [
        63e6,
        5e5,
        4194304,
        1.5e9,
        2e9,
    ]
    assert (seconds_text(2.0), seconds_text(0.0021)) == ("2.00 s", "2.1 ms")


def test_words_of_keys_are_not_words_of_the_command() -> None:
    words = ["tiny", "--lora.targets", "q", "v", "--gpus", "8", "--optim.lr=-1", "-o", "x.toml"]
    assert split_flags(words) == (
        ["tiny", "--gpus", "8", "-o", "x.toml"],
        ["--lora.targets", "q", "v", "--optim.lr=-1"],
    )
    assert split_flags(["--explain", "-1", "--data.seed", "-1"]) == (
        ["--explain", "-1"],
        ["--data.seed", "-1"],
    )


def test_what_counts_as_near_is_the_error_of_published_steps() -> None:
    errors = [abs(row.predicted() / row.seconds - 1) for row in ROWS]
    assert statistics.median(errors) == pytest.approx(MEDIAN_ERROR, abs=0.005)


def test_why_a_plan_loses() -> None:
    best = StepTime(seconds=2.0, compute=1.0, exposed=0.5, bubble=0.4, end=0.1)
    other = StepTime(seconds=3.0, compute=1.2, exposed=1.3, bubble=0.4, end=0.1)
    plans = [
        Plan(layout=Layout(), stages=(1,), time=time, bytes_of=(1.0,), room=2.0) for time in (best, other)
    ]
    assert loses_by(*plans) == "800.0 ms exposed"
