"""What all-reduces ask of the reductions under them: both kinds answer all of it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest

from moeclipse.comm.reduce.on_device import CudaReducer
from moeclipse.comm.reduce.on_host import CpuReducer
from moeclipse.comm.reduce.reducer import Reducer, run_out


def asked() -> list[str]:
    return [name for name in vars(Reducer) if not name.startswith("_")]


@pytest.mark.parametrize("kind", [CpuReducer, CudaReducer])
def test_both_answer_all_that_is_asked(kind: type) -> None:
    """With the same arguments in the same order; mypy compares their types."""
    assert len(asked()) > 10
    for name in asked():
        wanted, given = getattr(Reducer, name), getattr(kind, name)
        if inspect.isfunction(wanted):
            expected = [(p.name, p.default) for p in inspect.signature(wanted).parameters.values()]
            found = [(p.name, p.default) for p in inspect.signature(given).parameters.values()]
            assert found[: len(expected)] == expected, name


def test_one_kind_waits_and_the_other_launches() -> None:
    assert (CpuReducer.asynchronous, CudaReducer.asynchronous) == (False, True)
    assert set(CudaReducer.dtypes) < set(CpuReducer.dtypes)


def test_steps_are_run_to_their_end() -> None:
    done: list[int] = []

    def steps() -> Iterator[None]:
        for number in range(3):
            done.append(number)
            yield
        done.append(99)

    run_out(steps())
    assert done == [0, 1, 2, 99]
