"""`moeclipse place`: a table of planners, plans that can be read back, a picture, clear refusals."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from moeclipse.balance.config import PlacementConfig
from moeclipse.balance.load import Load, LoadTrace
from moeclipse.balance.placement import Placement
from moeclipse.cli.main import main
from moeclipse.cli.place import BESIDE, PlaceConfig, fill, layers_of, options_of, plan_text
from moeclipse.cli.place_plans import fitting
from moeclipse.cli.place_run import RunFacts


@pytest.fixture
def load_file(tmp_path: Path) -> Path:
    trace = LoadTrace()
    rng = np.random.default_rng(0)
    weight_LE = np.stack([rng.permutation(np.arange(1, 17) ** -1.5) for _ in range(3)])
    for step in range(12):
        weight_LE = weight_LE * np.exp(rng.normal(0, 0.02, weight_LE.shape))
        counts = [rng.multinomial(32768, weight / weight.sum(), size=4) for weight in weight_LE]
        trace.add(step, np.stack(counts))
    trace.save(tmp_path / "load.npz")
    return tmp_path / "load.npz"


def place(load_file: Path, *words: str) -> int:
    return main(["place", str(load_file), "--time-limit", "0", *words])


def test_the_table(load_file: Path, capsys: pytest.CaptureFixture) -> None:
    assert place(load_file, "--ranks", "4", "--slots", "6", "--nodes", "2") == 0
    out = capsys.readouterr().out
    assert "3 layers, 16 experts, 4 ranks on 2 nodes with 6 slots each" in out
    assert "planned from the loads up to step 11; measured on step 12, which no planner has seen" in out
    rows: dict[str, list[str]] = {}
    for line in out.splitlines():
        if line and line[0] != " ":
            rows.setdefault(line.split()[0], line.split())
    for name in ("static", "greedy", "incremental", "wrap-fill"):
        assert name in rows
    assert float(rows["static"][1]) < 0.7
    assert float(rows["wrap-fill"][1]) > 0.98
    assert float(rows["static"][3]) == 0
    assert "cross-node" in rows["planner"]
    assert "exact" not in out


def test_one_node_has_no_cross_node_column(load_file: Path, capsys: pytest.CaptureFixture) -> None:
    assert place(load_file, "--ranks", "4", "--slots", "6", "--layer", "1") == 0
    out = capsys.readouterr().out
    assert not any("cross-node" in line for line in out.splitlines() if line.startswith("planner"))
    assert "layer 1, 16 experts" in out


def test_plans_are_read_back(load_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    plan = tmp_path / "plan.json"
    words = ("--ranks", "8", "--slots", "4", "--planner", "wrap_fill", "--out", str(plan))
    assert place(load_file, *words) == 0
    layers = [Placement.parse(entry, max_slots=4) for entry in json.loads(plan.read_text())["layers"]]
    assert [(p.num_experts, p.num_ranks) for p in layers] == [(16, 8)] * 3
    capsys.readouterr()
    assert place(load_file, *words, "--current", str(plan)) == 0
    static = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("static")]
    assert float(static[0][1]) > 0.95  # what holds now is the plan, not the order of experts
    assert place(load_file, "--ranks", "8", "--slots", "4", "--layer", "0", "--out", str(plan)) == 0
    assert Placement.load(plan).num_ranks == 8


PROBE = {
    "row_forward": 1e-6,
    "row_backward": 2e-6,
    "bandwidth": 1e9,
    "shared_wire": False,
    "row_bytes": 64.0,
    "parameter_bytes": 1e4,
    "gradient_bytes": 2e4,
}


def test_a_run_is_planned_for_with_what_it_knows_of_itself(
    load_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Ranks, slots, interval and layers of the run, and the costs that it measured."""
    (tmp_path / "config.toml").write_text(
        "[model]\nnum_dense_layers = 1\ndense_layers = [3]\nd_model = 8\n[moe]\nd_ff = 16\n"
        "[placement]\nslots_per_rank = 6\nevery = 7\n"
    )
    assert main(["place", str(tmp_path), "--time-limit", "0"]) == 0
    out = capsys.readouterr().out
    assert "seconds: as if experts of 8 x 16 ran on h200, infiniband between nodes" in out
    choices = {"ranks": [1, 4, 1, 1], "layers": {}, "placement": PROBE}
    (tmp_path / "choices.json").write_text(json.dumps(choices))
    plan = tmp_path / "plan.json"
    assert main(["place", str(tmp_path), "--time-limit", "0", "--out", str(plan)]) == 0
    out = capsys.readouterr().out
    assert "3 layers, 16 experts, 4 ranks with 6 slots each" in out
    assert "seconds: from what the run has measured on its ranks" in out
    assert "incremental predicts experts and their exchange" in out
    assert {line.split(":")[0] for line in out.splitlines() if line.startswith("  layer ")} == {
        "  layer 1",
        "  layer 2",
        "  layer 4",
    }
    tables = PlacementConfig(slots=str(plan), slots_per_rank=6).placements(16, 4)
    assert len(tables) == 3, "training takes the plan"
    assert main(["place", str(tmp_path), "--time-limit", "0", "--device", "h100"]) == 0
    assert "ran on h100" in capsys.readouterr().out


def test_the_picture(load_file: Path, tmp_path: Path) -> None:
    assert place(load_file, "--ranks", "4", "--slots", "6", "--plot", str(tmp_path / "heat.png")) == 0
    assert (tmp_path / "heat.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--ranks", "2", "--slots", "6"), "16 experts do not fit into 12 slots (2 ranks)"),
        (("--ranks", "4", "--slots", "6", "--nodes", "3"), "nodes (3) must divide ranks (4)"),
        (
            ("--ranks", "4", "--slots", "6", "--layer", "3"),
            "--layer (3) has no experts; choose one of 0, 1, 2",
        ),
        (
            ("--ranks", "4", "--slots", "6", "--planner", "x"),
            "--planner 'x' is unknown; choose one of random",
        ),
        (("--ranks", "0", "--slots", "6"), "--ranks (0) and --slots (6) must be at least 1"),
        (("--ranks", "4", "--slots", "6", "--current", "no.json"), "--current: there is no file no.json"),
    ],
)
def test_refusals(
    load_file: Path, capsys: pytest.CaptureFixture, words: tuple[str, ...], message: str
) -> None:
    assert place(load_file, *words) == 2
    assert message in capsys.readouterr().err


def test_a_placement_that_does_not_fit_is_refused(
    load_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    bad = tmp_path / "bad.json"
    words = ("--ranks", "4", "--slots", "6", "--current", str(bad))
    for text, message in (
        (json.dumps([[0, 99], [1], [2], [3]]), "rank 0 is given expert 99, but experts are 0 to 15"),
        (json.dumps({"layers": [[[0]]]}), "holds 1 placements, but 3 layers are planned"),
        ("[[0", "is not JSON"),
    ):
        bad.write_text(text)
        assert place(load_file, *words) == 2
        assert message in capsys.readouterr().err


def test_exact(load_file: Path, capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("highspy")
    words = [str(load_file), "--ranks", "4", "--slots", "6", "--layer", "0", "--time-limit", "1"]
    assert main(["place", *words]) == 0
    assert any(line.startswith("exact") for line in capsys.readouterr().out.splitlines())


def test_no_torch() -> None:
    code = "import sys, moeclipse.cli.place; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_was_left_out_comes_from_the_loads(load_file: Path) -> None:
    load = Load.read(load_file)
    config = fill(PlaceConfig(load=load_file, plot=Path(BESIDE)), load, RunFacts.read(load_file))
    assert (config.ranks, config.slots, config.plot) == (4, 5, load_file.with_suffix(".png"))
    layers = layers_of(config, load)
    assert [layer.number for layer in layers] == [0, 1, 2]
    assert all(layer.current == Placement.contiguous(16, 4) for layer in layers)
    assert layers[0].next_PE.sum() == 4 * 32768, "the last step, which no planner has seen"
    assert not np.array_equal(np.rint(layers[0].seen_PE), layers[0].next_PE)


def test_a_plot_without_a_name_lies_beside_the_loads() -> None:
    assert options_of(["load.npz", "--plot"]).plot == Path(BESIDE)
    assert options_of(["load.npz", "--plot", "--ranks", "4"]) == PlaceConfig(
        load=Path("load.npz"), plot=Path(BESIDE), ranks=4
    )
    assert options_of(["load.npz", "--plot", "heat.png"]).plot == Path("heat.png")


def test_one_plan_is_a_placement_and_several_are_layers() -> None:
    one = Placement(((0, 1), (1,)), (0, 1))
    assert Placement.from_json(plan_text([one])) == one
    assert len(json.loads(plan_text([one, one]))["layers"]) == 2


def test_layers_that_would_take_too_long_are_left_out(
    load_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The least even ones are kept, in their order; what is written has all of them."""
    load = Load.read(load_file)
    facts = RunFacts.read(load_file)
    config = fill(PlaceConfig(load=load_file, ranks=4), load, facts)
    layers = layers_of(config, load, facts.layer_numbers(load.num_layers), facts.copies(4))
    (one,) = fitting(layers, 0.1, lambda _: time.sleep(0.11))
    peaks = [float(layer.seen_PE.sum(0).max() / layer.seen_PE.sum()) for layer in layers]
    assert one is layers[peaks.index(max(peaks))]
    assert fitting(layers, 0, lambda _: time.sleep(1)) == layers
    assert place(load_file, "--ranks", "4", "--seconds", "1e-9") == 0
    assert "compared on 1 of 3 layers" in capsys.readouterr().out
    out = load_file.with_suffix(".json")
    assert place(load_file, "--ranks", "4", "--seconds", "1e-9", "--out", str(out)) == 0
    assert len(json.loads(out.read_text())["layers"]) == 3
