"""Equal choices, equal bits: two runs, and one that is killed four times, with a planner on."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from test_trainer import configure, losses, whole

from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.core.errors import ConfigError
from moeclipse.moe.config import GateConfig
from moeclipse.moe.layer import MoE
from moeclipse.moe.tune import exchange_policy
from moeclipse.moe.tune.cut_choice import LEAST_CALLS, LayerChoice
from moeclipse.moe.tune.granularity import Granularity
from moeclipse.moe.tune.stopwatch import tell
from moeclipse.testing.run_ranks import run_ranks, run_ranks_raw
from moeclipse.train.config import TrainConfig
from moeclipse.train.run.choices import FILE, Choices, trial_calls
from probed import PROBE

PLANNED = {
    "placement.planner": "random",  # it moves experts whatever that was measured to cost
    "placement.start_step": 2,
    "placement.every": 3,
    "placement.commit_after": 2,
    "placement.slots_per_rank": 3,
    "run.steps": 12,
    "checkpoint.every": 2,
}
CUT = {"groups": [[0]], "chunks": 2, "units": None}
KEPT = LayerChoice(probe=PROBE, tried=(Granularity(groups=((0,),), chunks=2),), calls=3, chosen=None)
WRITTEN = json.loads(json.dumps(asdict(KEPT)))
LAYER = {"probe": asdict(PROBE), "tried": [CUT], "calls": 3, "chosen": None}
TUNED = {"moe.schedule": "smart", "moe.chunks": "auto", "moe.shadow": "auto", "placement.planner": "auto"}


def directory(config: TrainConfig) -> Path:
    return Path(config.run.dir) / config.run.name


def weights(config: TrainConfig) -> dict[str, bytes]:
    """Every file of the last checkpoint that holds tensors."""
    folder = sorted((directory(config) / "checkpoints").iterdir())[-1]
    found = {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
    assert found
    return found


def check_repeats(tmp_path: Path, changes: dict[str, Any], kills: list[tuple[int, int]]) -> None:
    first = configure(tmp_path, **{**PLANNED, **changes, "run.name": "first"})
    run_ranks(2, whole, first)
    choices = str(directory(first) / FILE)
    second = with_values(first, {"run.name": "second", "run.tuned_from": choices})
    resume = "off"
    for victim, step in kills:
        outcomes = run_ranks_raw(2, whole, second, resume, victim, step)
        assert not any(ok for ok, _ in outcomes)
        resume = "auto"
    run_ranks(2, whole, second, resume)
    assert losses(second) == losses(first)
    assert weights(second) == weights(first)
    assert json.loads(Path(choices).read_text())["layers" if "moe.shadow" in changes else "placement"]
    repeated = (directory(second) / FILE).read_text()
    assert repeated == Path(choices).read_text(), "nothing was measured again"
    moved = json.loads((directory(first) / "summary.json").read_text())["placement"]["plans"]
    lines = map(json.loads, (directory(first) / "metrics.jsonl").read_text().splitlines())
    lines = [line for line in lines if "plan_before_ms" in line]
    assert all(0 <= line["plan_step"] < line["step"] for line in lines)
    assert all(line["plan_since"] == 0 for line in lines), "a run this short tries no cuts"
    told = ["predicted to take" in str(line.get("notes")) for line in lines]
    assert len(told) == moved
    assert moved >= 2 or changes.get("placement.planner") == "auto", (
        "auto moves what pays by what it measured"
    )
    assert all(told), "a line has the seconds of the plan that its note tells of"


def test_two_runs_with_equal_choices_are_equal(tmp_path: Path) -> None:
    check_repeats(tmp_path, {}, [])


@pytest.mark.full
@pytest.mark.parametrize("changes", [{}, TUNED], ids=["planned", "tuned"])
def test_a_run_that_is_killed_four_times_is_equal(changes: dict[str, Any], tmp_path: Path) -> None:
    check_repeats(tmp_path, {**changes, "run.steps": 16}, [(0, 2), (1, 5), (1, 6), (0, 11)])


@pytest.mark.full
def test_two_tuned_runs_with_equal_choices_are_equal(tmp_path: Path) -> None:
    check_repeats(tmp_path, {**TUNED, "run.steps": 34}, [])


BRIEF = {"run.steps": 70, "checkpoint.every": 0, "placement.planner": "static", "model.num_layers": 1}
BRIEF |= {"run.deterministic": False}


@pytest.mark.full
def test_a_run_chooses_by_itself_and_another_repeats_it_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before its first checkpoint, amid trials, and begun again: with the choices that it made."""
    monkeypatch.setattr(
        exchange_policy, "measured", lambda *_: PROBE
    )  # a busy machine may not be able to tell
    first = configure(tmp_path, **{**BRIEF, "run.name": "first"})
    assert first.moe.schedule == "auto"
    run_ranks(2, whole, first)
    (layer,) = json.loads((directory(first) / FILE).read_text())["layers"].values()
    assert layer["chosen"] is not None
    assert len(layer["tried"]) * layer["calls"] <= trial_calls(first)
    second = with_values(first, {"run.name": "second", "run.tuned_from": str(directory(first))})
    outcomes = run_ranks_raw(2, whole, second, "off", 1, 5)
    assert not any(ok for ok, _ in outcomes)
    run_ranks(2, whole, second, "auto")
    assert losses(second) == losses(first)
    assert weights(second) == weights(first)


def test_a_short_run_spends_nothing_on_trials(tmp_path: Path) -> None:
    config = configure(tmp_path, **{"run.steps": 4, "checkpoint.every": 0})
    assert config.moe.schedule == "auto"
    assert trial_calls(config) < 2 * LEAST_CALLS
    notes = run_ranks(2, whole, config)
    assert not any("exchange:" in note for found in notes for note in found)
    written = directory(config) / FILE
    assert not (written.exists() and json.loads(written.read_text())["layers"])
    longer = with_values(config, {"run.steps": 300, "optim.accumulate": 2})
    assert trial_calls(longer) == 60


def written(choices: Choices) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        json.dumps({name: asdict(one) for name, one in choices.layers.items()})
    )
    return found


def read_there(mesh: Mesh, folder: str, given: str, resumed: bool) -> Any:
    choices = Choices(mesh, Path(folder))
    try:
        choices.read(given, resumed)
    except ConfigError as error:
        return str(error)
    return [written(choices), choices.placement]


def test_choices_are_read_where_they_fit(tmp_path: Path) -> None:
    """Those of the run itself first, then those that were given; never those of other ranks."""
    mesh, own, other = Mesh.single(), tmp_path / "own", tmp_path / "other"
    for folder, seconds in ((own, 1.0), (other, 2.0)):
        folder.mkdir()
        placement = asdict(replace(PROBE, row_forward=seconds))
        text = {"ranks": [1, 1, 1, 1], "layers": {"0": LAYER}, "placement": placement}
        (folder / FILE).write_text(json.dumps(text))
    assert read_there(mesh, str(own), "", True)[1]["row_forward"] == 1.0
    assert read_there(mesh, str(own), str(other), True)[1]["row_forward"] == 1.0
    assert read_there(mesh, str(tmp_path), str(other), True)[1]["row_forward"] == 2.0
    assert read_there(mesh, str(own), str(other / FILE), False)[1]["row_forward"] == 2.0
    assert read_there(mesh, str(own), "", False) == [{}, None]
    assert "there is no file" in read_there(mesh, str(own), str(tmp_path / "nowhere"), False)
    (other / FILE).write_text('{"ranks": 3')
    assert "does not hold the choices of a run" in read_there(mesh, str(own), str(other), False)
    (own / FILE).write_text(json.dumps({"ranks": [2, 1, 1, 1], "layers": {"0": LAYER}, "placement": None}))
    assert read_there(mesh, str(own), "", True) == [{}, None], "made by other ranks"


DAMAGED = [
    ("layers", {"0": {}}, "missing 3 required"),
    ("layers", {"0": {**LAYER, "probe": {**LAYER["probe"], "link": 0.0}}}, "link (0.0) is no price"),
    ("layers", {"0": {**LAYER, "tried": [{**CUT, "chunks": 0}]}}, "no way to cut an exchange"),
    ("layers", {"0": {**LAYER, "tried": [{**CUT, "units": [[0, 2]]}]}}, "are not those of 1 x 2"),
    ("layers", {"0": {**LAYER, "chosen": "all"}}, "chosen to be a table or nothing"),
    ("placement", {**LAYER["probe"], "lnik": 1.0}, "no key 'lnik' in it; did you mean 'link'?"),
    ("settled", {"pipeline.overlap": [1]}, "one of "),
    ("search", {"step_s": 0}, "take no time"),
]


@pytest.mark.parametrize(("part", "damage", "told"), DAMAGED)
def test_what_no_run_has_written_is_refused(tmp_path: Path, part: str, damage: Any, told: str) -> None:
    """What ranks would build from it, none of them could, or each another thing."""
    sound = {"ranks": [1, 1, 1, 1], "layers": {"0": LAYER}, "placement": None, "search": {"step_s": 2.0}}
    (tmp_path / FILE).write_text(json.dumps(sound))
    assert read_there(Mesh.single(), str(tmp_path), "", True) == [{"0": WRITTEN}, None]
    (tmp_path / FILE).write_text(json.dumps({**sound, part: damage}))
    said = read_there(Mesh.single(), str(tmp_path), "", True)
    assert f"{tmp_path / FILE} does not hold the choices of a run" in said
    assert told in said


def test_cuts_for_other_ranks_are_refused(tmp_path: Path) -> None:
    choices = Choices(Mesh.single(), tmp_path)
    choices.layers["0"] = replace(KEPT, tried=(Granularity(groups=((0,), (1,)), chunks=2),))
    with pytest.raises(ConfigError, match="cuts layer 0, which 1 ranks share, into 4 units of 2 ranks"):
        choices.bind([MoE(4, 8, 4, gate=GateConfig(top_k=1), mesh=Mesh.single())])


def priced(mesh: Mesh, folder: str) -> list[Any]:
    layer = MoE(4, 8, 4, gate=GateConfig(top_k=1), mesh=mesh)
    choices = Choices(mesh, Path(folder))
    choices.bind([layer])
    for balance in (None, 0.99):
        choices.price_skew([layer], balance)
    choices.price_skew([], 0.5)
    even = choices.placement
    choices.price_skew([layer], 0.5)
    first = choices.placement
    choices.price_skew([layer], 0.5)
    return [even, first, choices.placement is first]


def test_uneven_ranks_are_priced_once_at_the_end(tmp_path: Path) -> None:
    found = run_ranks(2, priced, str(tmp_path))
    even, first, once = found[0]
    assert even is None
    assert once
    assert first["row_bytes"] > 0
    assert found[1][1] == first, "all ranks know the same"
    kept = json.loads((tmp_path / FILE).read_text())
    assert (kept["placement"], kept["hosts"]) == (first, [0, 0])


def priced_in_vain(mesh: Mesh, folder: str, what: str) -> list[Any]:
    """Rank 1 cannot do its part; what is told, and what ranks hear of each other afterwards."""
    layer = MoE(4, 8, 4, gate=GateConfig(top_k=1), mesh=mesh)
    choices = Choices(mesh, Path(folder))
    choices.bind([layer])

    def fails(*_: Any) -> Any:
        raise MemoryError("no room for\x1b[2J rows")

    if mesh.rank == 1 and what != "disk":
        setattr(type(layer.experts), what, fails)
    told = choices.price_skew([layer], 0.5)
    return [told, choices.placement is None, mesh.gather_objects(mesh.rank), tell(mesh, [mesh.rank])]


@pytest.mark.parametrize("what", ["forward", "dgrad"])
def test_experts_that_fail_while_they_are_priced_leave_no_rank_waiting(tmp_path: Path, what: str) -> None:
    """The others would take the next transfer of the run for theirs."""
    found = run_ranks(3, priced_in_vain, str(tmp_path), what)
    told = r"could not be measured: rank 1: MemoryError: no room for\x1b[2J rows"
    assert found == [[[f"what experts and wires cost {told}"], True, [0, 1, 2], [[0.0], [1.0], [2.0]]]] * 3
    assert not (tmp_path / FILE).exists()


def test_choices_that_find_no_room_at_the_end_are_told(tmp_path: Path) -> None:
    (tmp_path / FILE).mkdir()
    found = run_ranks(2, priced_in_vain, str(tmp_path), "disk")
    assert [told for told, *_ in found] == [[f"{FILE} cannot be written: Is a directory"]] * 2


def kept(mesh: Mesh, folder: str) -> list[Any]:
    """What one object writes and the next one reads, as a run that goes on does."""
    one, other = (Choices(mesh, Path(folder)) for _ in range(2))
    one.search = {"search_s": 0.5, "step_s": 2.0}
    one.write()
    other.read("", resumed=True)
    return [other.search, other.layers, other.placement]


def test_what_looking_for_plans_took_is_kept(tmp_path: Path) -> None:
    """A run that measured it again would search other layers than it did before it was killed."""
    assert run_ranks(2, kept, str(tmp_path)) == [[{"search_s": 0.5, "step_s": 2.0}, {}, None]] * 2


def read_by_stages(mesh: Mesh, folder: str) -> list[Any]:
    choices = Choices(mesh, Path(folder))
    try:
        choices.read("", resumed=True)
    except ConfigError as error:
        return [str(error)]
    return [written(choices), choices.settled, choices.search]


def test_what_all_stages_decide_is_known_to_all_or_to_none(tmp_path: Path) -> None:
    """A kill between two writes leaves it in the file of one stage, which would ask the others nothing."""
    search, settled = {"step_s": 2.0, "search_s": 0.5}, {"moe.transport": "direct"}
    first: dict[str, Any] = {"ranks": [1, 1, 1, 2], "layers": {"0": LAYER}, "placement": None, "hosts": [0]}
    first |= {"settled": settled, "search": search}
    other = {**first, "layers": {"1": LAYER}, "search": {**search, "step_s": 3.0}}
    (tmp_path / FILE).write_text(json.dumps(first))
    nothing = [{}, None, None]
    assert run_ranks(2, read_by_stages, str(tmp_path), pp=2) == [[{"0": WRITTEN}, None, None], nothing]
    for changes, known in (
        ({}, [settled, True]),
        ({"settled": None}, [None, True]),
        ({"search": {"step_s": 3.0}}, [settled, False]),
        ({"ranks": [2, 1, 1, 2]}, None),
    ):
        (tmp_path / "choices-1.json").write_text(json.dumps({**other, **changes}))
        one, two = run_ranks(2, read_by_stages, str(tmp_path), pp=2)
        if known is None:
            assert (one, two) == ([{"0": WRITTEN}, None, None], nothing)
            continue
        assert one == [{"0": WRITTEN}, known[0], search if known[1] else None]
        searched = other["search"] if known[1] else None
        assert two == [{"1": WRITTEN}, known[0], searched], "each has its own seconds"
    (tmp_path / "choices-1.json").write_text("{")
    one, two = run_ranks(2, read_by_stages, str(tmp_path), pp=2)
    assert one == two, "all ranks say the same"
    assert "choices-1.json does not hold the choices of a run" in one[0]
