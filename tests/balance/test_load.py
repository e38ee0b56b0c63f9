"""Averages are right from the first step, traces span the run in bounded space, files are checked."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeclipse.balance.load import Load, LoadAverage, LoadTrace, spread
from moeclipse.core.errors import ConfigError


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=30), st.floats(0, 0.99))
def test_the_average_is_a_weighted_mean_from_the_first_step_on(values: list[int], decay: float) -> None:
    average = LoadAverage(decay=decay)
    for value in values:
        average = average.add(np.full((1, 2, 3), value))
    weights = decay ** np.arange(len(values) - 1, -1, -1, dtype=float)
    assert np.allclose(average.rows_LPE, np.dot(weights, values) / weights.sum())


def test_averages_refuse_nonsense() -> None:
    with pytest.raises(ConfigError, match=r"decay \(1.0\) must lie in \[0, 1\)"):
        LoadAverage(decay=1.0)
    with pytest.raises(ConfigError, match="there is no load yet; add the counts of a step first"):
        _ = LoadAverage().rows_LPE
    with pytest.raises(
        ConfigError, match=r"counts are \[1, 2, 4\], but the average was begun with \[1, 2, 3\]"
    ):
        LoadAverage().add(np.zeros((1, 2, 3))).add(np.zeros((1, 2, 4)))


def test_a_long_trace_is_thinned_but_spans_the_run() -> None:
    trace = LoadTrace(max_steps=8)
    for step in range(100):
        trace.add(step, np.full((2, 3, 4), step))
    assert len(trace.steps) <= 8
    assert (trace.steps[0], trace.every) == (0, 16)
    assert np.diff(trace.steps).tolist() == [16] * (len(trace.steps) - 1)
    assert all((rows == 3 * step).all() for step, rows in zip(trace.steps, trace.rows_LE, strict=True))


def test_a_trace_of_a_resumed_run_is_thinned_to_even_distances() -> None:
    trace = LoadTrace(max_steps=4)
    for step in range(1, 20):  # an odd first step: every other entry would be the wrong ones
        trace.add(step, np.full((1, 1, 1), step))
    assert trace.steps == [4, 8, 12, 16]
    assert trace.every == 4


def test_what_was_known_before_the_last_step_counts_new_steps_most() -> None:
    trace = LoadTrace()
    for step, rows in enumerate((10, 20, 999)):
        trace.add(step, np.full((1, 2, 1), rows))
    before = trace.load().before_last(decay=0.5)
    assert before.average_LPE.sum() == pytest.approx(2 * (0.5 * 10 + 20) / 1.5)
    assert before.steps_N.tolist() == [0, 1]


def make_trace(steps: int = 5) -> LoadTrace:
    trace = LoadTrace()
    rng = np.random.default_rng(0)
    for step in range(steps):
        trace.add(step, rng.integers(0, 50, (2, 4, 6)))
    return trace


def test_file_round_trip(tmp_path: Path) -> None:
    trace, path = make_trace(), tmp_path / "load.npz"
    trace.save(path)
    load = Load.read(path)
    assert np.array_equal(load.average_LPE, trace.average.rows_LPE)
    assert np.array_equal(load.rows_NLE, np.stack(trace.rows_LE))
    assert (load.num_layers, load.num_experts) == (2, 6)
    assert [file.name for file in tmp_path.iterdir()] == ["load.npz"]


def test_counts_for_any_number_of_ranks() -> None:
    load = make_trace().load()
    for num_ranks in (1, 4, 6):
        counts_PE = load.counts(1, num_ranks)
        assert counts_PE.shape == (num_ranks, 6)
        assert np.allclose(counts_PE.sum(0), load.average_LPE[1].sum(0))
        last = load.last_step(1, num_ranks)
        assert last is not None
        assert np.array_equal(last.sum(0), load.rows_NLE[-1, 1])
        assert (last >= 0).all()
    assert np.array_equal(spread(load.average_LPE[0], 4), load.average_LPE[0])


def test_planners_do_not_see_the_last_step() -> None:
    load = make_trace().load()
    changed = Load(
        average_LPE=load.average_LPE,
        steps_N=load.steps_N,
        rows_NLE=np.concatenate([load.rows_NLE[:-1], load.rows_NLE[-1:] * 100]),
    )
    assert np.array_equal(load.before_last().average_LPE, changed.before_last().average_LPE)
    assert len(load.before_last().steps_N) == 4


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"a": np.zeros(3)}, "is no load file: it lacks average_LPE, steps_N, rows_NLE"),
        ({"average_LPE": np.zeros((2, 2))}, r"average_LPE is \[2, 2\]; expected \[layers, ranks, experts\]"),
        ({"average_LPE": -np.ones((1, 2, 3))}, "negative or not finite"),
        ({"average_LPE": np.ones((1, 2, 3))}, r"rows_NLE is \[0, 1, 6\]; expected \[0, 1, 3\]"),
        ({"average_LPE": np.array([None])}, "is no load file, or damaged: Object arrays cannot be loaded"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, arrays: dict[str, np.ndarray], message: str) -> None:
    path = tmp_path / "load.npz"
    rest = {} if "a" in arrays else {"steps_N": np.zeros(0, int), "rows_NLE": np.zeros((0, 1, 6), int)}
    np.savez(path, **arrays, **rest)
    with pytest.raises(ConfigError, match=message):
        Load.read(path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no load file"):
        Load.read(tmp_path / "load.npz")
    for data in (b"", b"PK\x03\x04 broken", b"hello"):
        (tmp_path / "load.npz").write_bytes(data)
        with pytest.raises(ConfigError, match="is no load file"):
            Load.read(tmp_path / "load.npz")
