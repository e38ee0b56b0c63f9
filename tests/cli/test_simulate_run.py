"""`moeclipse simulate --config`: the step of a run as its configuration lays it out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moeclipse.cli.simulate import main
from moeclipse.cli.simulate_run import RunStep, RunTerms, load_run
from moeclipse.core.errors import ConfigError, ScheduleError
from moeclipse.schedule import kinds

RUN = """
preset = "tiny"
[model]
num_layers = 6
num_dense_layers = 1
[parallel]
pp = 2
dp = 1
ep = 2
[pipeline]
schedule = "dualpipev"
overlap = "pair+self"
layers = [1, 1, 1, 3]
recompute = "mlp"
[optim]
accumulate = 4
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


def loaded(path: Path, num_ranks: int | None = None, costs: str | None = None) -> RunStep:
    return load_run(path, RunTerms(num_ranks=num_ranks, costs=costs))


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(list(argv)) == 0
    return capsys.readouterr().out


def test_the_program_is_that_of_the_run(file: Path) -> None:
    """Uneven stages, a dense first layer, the head at the end, recompute, gradients summed over ep."""
    shape = loaded(file).answer("dualpipev").result.program.pipeline()
    assert [len(stage) for stage in shape.layers] == [1, 1, 1, 3]
    layers = [layer for stage in shape.layers for layer in stage]
    assert [layer.moe for layer in layers] == [False, True, True, True, True, True]
    assert [layer.head for layer in layers] == [False] * 5 + [True]
    assert {layer.recompute for layer in layers} == {"mlp"}
    assert shape.step is not None
    assert [launch.kind for launch in layers[1].launches] == [
        *(kinds.COUNTS_F, kinds.COUNTS_F, kinds.SIZES_F, kinds.SCORES_F, kinds.SCORES_B),
    ], "replicas wait for loads, shadows for counts"
    assert [len(buckets) for buckets in shape.step.buckets] == [9, 4]
    assert shape.num_microbatches == 4


def test_it_is_shown_like_any_other(capsys: pytest.CaptureFixture[str], file: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    out = printed(capsys, "--config", str(file), "--link", "infiniband", "--trace", str(trace))
    assert out.startswith("dualpipev: pp 2 x dp 1 x ep 2 x tp 1, 6 layers, 4 microbatches")
    told = "costs h200, 8 a node over nvlink4, infiniband between nodes, overlap pair+self, recompute mlp"
    assert told in out
    assert "DISPATCH_F" in out
    assert "REDUCE" in out
    assert trace.is_file()


def test_a_comparison_lists_what_it_announces(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    out = printed(capsys, "--config", str(file), "--compare")
    announced, rows = int(out.split()[0]), out.split("parameters\n", 1)[1].splitlines()
    table = rows[: next(i for i, row in enumerate(rows) if row.startswith("bubble"))]
    left_out = [line for line in out.splitlines() if " left out: " in line]
    assert len([row for row in table if row.strip()]) == announced > 0
    assert announced + len(left_out) == 13
    assert any(line.startswith("gpipe left out: ") and "4 stages" not in line for line in left_out)


def test_ranks_decide_what_a_configuration_leaves_open(file: Path) -> None:
    file.write_text(RUN.replace("dp = 1\nep = 2\n", ""))
    with pytest.raises(ConfigError, match="depend on the number of ranks; say how many with --ranks"):
        loaded(file)
    run = loaded(file, num_ranks=8)
    assert (run.dp, run.ep) == (1, 4)
    with pytest.raises(ConfigError, match=r"--ranks 7: parallel.pp \(2\) must divide"):
        loaded(file, num_ranks=7)


def test_more_ranks_have_less_to_compute_and_more_to_send(file: Path) -> None:
    file.write_text(RUN.replace("dp = 1\nep = 2\n", ""))

    def spent(num_ranks: int) -> tuple[float, float]:
        summary = loaded(file, num_ranks=num_ranks).answer("dualpipev").summary
        return summary.ranks[0].compute, sum(time.total for time in summary.kinds.values()) / len(
            summary.ranks
        )

    few, many = spent(2), spent(8)
    assert many[0] < few[0]
    assert many[1] > few[1]


def test_a_table_of_costs_takes_the_place_of_sizes(file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a run needs seconds of layer ops"):
        loaded(file, costs="unit")
    table = tmp_path / "costs.toml"
    parts = [f"{part}_{form} = 1.0" for part in ("ATTN", "ROUTE", "MLP", "HEAD") for form in "FBW"]
    parts += [f"{part}_{form} = 0.0" for part in ("DISPATCH", "COMBINE") for form in "FB"]
    table.write_text("[seconds]\n" + "\n".join(parts))
    result = loaded(file, costs=str(table)).answer("dualpipev").result
    computes = [
        op.kind.lane == "compute" and op.kind is not kinds.BUCKET_UPDATE for op in result.program.ranks[0]
    ]
    assert ((result.finish - result.start)[: len(computes)][computes] > 0).all()


def test_tokens_are_those_of_one_microbatch_on_one_rank(file: Path) -> None:
    run = loaded(file)
    assert run.step_costs.work.tokens == 16 * 128 // (4 * 2)  # type: ignore[attr-defined]
    program = run.answer("dualpipev").result.program
    assert any(op.kind is kinds.HEAD_W for ops in program.ranks for op in ops)


def test_what_cannot_go_together_is_told(file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no file .*none\.toml"):
        main(["--config", str(tmp_path / "none.toml")])
    with pytest.raises(ConfigError, match="--grid speaks of whole actions; a run is simulated in layers"):
        main(["--config", str(file), "--grid"])
    with pytest.raises(ConfigError, match="unknown schedule 'dual'"):
        main(["--config", str(file), "--compare", "dual"])


def test_what_is_given_beside_a_configuration_counts(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    common = ("--config", str(file))
    out = printed(capsys, *common, "--microbatches", "8", "--recompute", "full", "--overlap", "off")
    assert "6 layers, 8 microbatches" in out
    assert out.splitlines()[0].endswith("recompute full")
    assert "overlap" not in out.splitlines()[0]
    assert printed(capsys, *common) == printed(
        capsys, *common, "--microbatches", "4", "--recompute", "mlp", "--overlap", "pair+self"
    ), "what the file says itself"


def test_memory_is_counted_in_bytes(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    """State, activations as the program holds them, and what is beside them."""
    answer = loaded(file).answer("dualpipev")
    kept, peak = answer.summary.peak, max(answer.bytes_of) / 2**30
    assert all(size > most > 0 for size, most in zip(answer.bytes_of, kept, strict=True))
    out = printed(capsys, "--config", str(file))
    assert out.splitlines()[-1].endswith(f"peak {peak:.2f} GiB, weights and all")
    assert "in GiB, weights and all" in printed(capsys, "--config", str(file), "--compare").replace("\n", " ")
    file.write_text(RUN.replace('recompute = "mlp"', 'recompute = "off"'))
    assert max(loaded(file).answer("dualpipev").summary.peak) > max(kept)


def test_a_memory_limit_holds_for_a_run(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    common = ("--config", str(file), "--memory-limit")
    peak = max(loaded(file).answer("dualpipev").bytes_of) / 2**30
    assert printed(capsys, *common, f"{peak + 0.01}") == printed(capsys, "--config", str(file))
    with pytest.raises(
        ScheduleError, match=r"dualpipev: rank \d of the pipeline takes .* GiB .* more than the 1 allowed"
    ):
        main([*common, "1"])
    inputs = RUN.replace('recompute = "mlp"', 'recompute = "full"').replace('"dualpipev"', '"1f1b"')
    file.write_text(inputs.replace("[1, 1, 1, 3]", "[2, 4]"))
    with pytest.raises(ScheduleError, match=r"; with memory.activations = 'host' [\d.]+ GiB, in [\d.]+ s$"):
        main([*common, "0.1"])
    file.write_text(RUN)
    out = printed(capsys, *common, "1", "--compare")
    assert out.startswith("0 schedules")
    assert "dualpipev left out: rank" in out


@pytest.mark.parametrize(
    ("option", "value", "key"),
    [
        ("--layers", "4", "model.num_layers"),
        ("--stages-per-rank", "3", "pipeline.layers_per_virtual_stage"),
        ("--chunks", "2", "pipeline.chunks"),
        ("--split", "moe", "cuts whole samples"),
    ],
)
def test_what_a_configuration_says_itself_is_refused(option: str, value: str, key: str, file: Path) -> None:
    with pytest.raises(ConfigError, match=f"{option} .*{key}"):
        main(["--config", str(file), option, value])


@pytest.mark.parametrize(("option", "value"), [("--device", "cpu"), ("--link", "hdr"), ("--imbalance", "2")])
def test_what_only_a_run_takes_is_refused_without(option: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{option} prices the step of a run; it goes with RUN or --config"):
        main(["--ranks", "2", "--microbatches", "4", option, value])


def test_bad_microbatches_are_refused(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"optim.accumulate \(0\)"):
        main(["--config", str(file), "--microbatches", "0"])


def test_a_schedule_brings_its_own_options(capsys: pytest.CaptureFixture[str], file: Path, run: Path) -> None:
    """A budget goes with zb-m, whatever schedule the file names; prices stay those of the run that was."""
    out = printed(capsys, str(file), "--schedule", "zb-m", "--budget", "1", "--overlap", "off")
    assert out.startswith("zb-m: ")
    with pytest.raises(ConfigError, match=r"pipeline.budget \(1\) is for pipeline.schedule = 'zb-m'"):
        main([str(file), "--budget", "1"])
    with pytest.raises(ConfigError, match="needs a schedule with pairs, and 1f1b has none"):
        main([str(file), "--schedule", "1f1b", "--overlap", "pair"])
    assert printed(capsys, str(run), "--schedule", "zb-v").startswith("zb-v: ")
    terms = RunTerms(changes={"pipeline.schedule": ("--schedule", "vpp+1")})
    found = load_run(run, terms)
    assert found.measured is not None
    assert (found.config.pipeline.schedule, found.measured.schedule) == ("vpp+1", "dualpipev")
    assert found.answer("dualpipev").summary == load_run(run, RunTerms()).answer("dualpipev").summary


def test_what_two_options_would_say_is_refused(file: Path) -> None:
    with pytest.raises(ConfigError, match="--device says what ops take; so does --costs"):
        main([str(file), "--costs", "deepseek-v3", "--device", "h100"])
    with pytest.raises(ConfigError, match="say which run to simulate, once"):
        main([str(file), "--config", str(file)])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run on two ranks that chose a schedule by itself."""
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    text = RUN.replace("dp = 1\nep = 2\n", "").replace('schedule = "dualpipev"', 'schedule = "auto"')
    (folder / "config.toml").write_text(text.replace('overlap = "pair+self"', 'overlap = "auto"'))
    settled = {"pipeline.schedule": "dualpipev", "pipeline.overlap": "pair"}
    (folder / "choices.json").write_text(json.dumps({"ranks": [1, 2, 1, 2], "settled": settled}))
    times = {"step_ms": 90.0, "compute_ms": 60.0, "comm_ms": 20.0, "window": "steps 3 to 9"}
    (folder / "summary.json").write_text(json.dumps(times))
    return folder


def test_the_folder_of_a_run_brings_its_ranks_choices_and_times(
    capsys: pytest.CaptureFixture[str], run: Path
) -> None:
    out = printed(capsys, str(run))
    assert out.startswith("dualpipev: pp 2 x dp 1 x ep 2 x tp 1, 6 layers, 4 microbatches, costs as measured")
    assert "overlap pair," in out.splitlines()[0]
    assert out.splitlines()[-1].startswith("measured 90.0 ms a step (steps 4 to 10);")
    found = load_run(run, RunTerms())
    answer = found.answer("dualpipev")
    times = answer.summary.ranks
    assert sum(rank.compute for rank in times) / len(times) == pytest.approx(0.060)
    moved = sum(time.total for time in answer.summary.kinds.values()) / len(times)
    assert moved == pytest.approx(0.020)
    other = found.answer("zb-v").summary  # the same work in another order, waits for the same wire
    assert sum(rank.compute for rank in other.ranks) / 2 == pytest.approx(0.060)


def test_what_was_measured_says_nothing_of_another_machine(
    capsys: pytest.CaptureFixture[str], run: Path
) -> None:
    for words in (["--device", "h100"], ["--ranks", "8"], ["--microbatches", "8"], ["--recompute", "off"]):
        out = printed(capsys, str(run), *words)
        assert "as measured" not in out
        assert "measured 90.0" not in out
    assert "costs cpu" in printed(capsys, str(run), "--ranks", "4"), "it ran without a GPU that is known"


def test_folders_that_hold_no_run_are_told(tmp_path: Path, run: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no run: there is no config.toml"):
        main([str(tmp_path)])
    (run / "choices.json").write_text('{"settled": {"pipeline.overbap": "pair"}}')
    with pytest.raises(ConfigError, match=r"overbap: unknown key; did you mean pipeline.overlap\? \(choices"):
        main([str(run)])
    (run / "choices.json").write_text("{")
    (run / "config.toml").write_text("[parallel]\npp = 2\n")
    with pytest.raises(ConfigError, match="say how many with --ranks"):
        main([str(run)])


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_wrote_no_choices_has_as_many_ranks_as_told_of_their_memory(run: Path, ranks: int) -> None:
    (run / "choices.json").unlink()
    (run / "config.toml").write_text('preset = "tiny"\n')
    memory = {"kinds": ["all"], "ranks": [[9]] * ranks}
    told = json.loads((run / "summary.json").read_text()) | {"memory": memory}
    (run / "summary.json").write_text(json.dumps(told))
    found = load_run(run, RunTerms())
    assert (found.dp * found.ep, found.measured is not None) == (ranks, True)
    assert load_run(run, RunTerms(num_ranks=4)).ep == 4
    for nothing in ({"ranks": []}, {"ranks": 2}, 7):
        (run / "summary.json").write_text(json.dumps(told | {"memory": nothing}))
        with pytest.raises(ConfigError, match="say how many with --ranks"):
            load_run(run, RunTerms())
