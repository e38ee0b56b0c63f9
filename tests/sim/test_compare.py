"""Schedules are compared on equal terms, and the advice follows from the numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moeclipse.core.errors import ScheduleError
from moeclipse.cost.model import DEEPSEEK_V3, UNIT, Costs
from moeclipse.schedule.templates import Expansion
from moeclipse.sim.compare import Answer, Question, advise, ask, ask_all


@pytest.mark.parametrize("costs", [UNIT, DEEPSEEK_V3], ids=lambda costs: costs.name)
def test_every_schedule_does_the_same_work(costs: Costs) -> None:
    """The compute of a rank is that of its layers for all microbatches, however it is cut."""
    answers, refused = ask_all(Question(ranks=4, microbatches=8, costs=costs, layers=2))
    assert set(refused) == {"pp1", "layers"}
    work = {answer.name: [rank.compute for rank in answer.summary.ranks] for answer in answers}
    expected = work["1f1b"][0]
    for name, computed in work.items():
        assert computed == pytest.approx([expected] * 4), name
    makespans = [answer.summary.makespan for answer in answers]
    assert makespans == sorted(makespans)
    assert {a.name: a.model_copies for a in answers}["dualpipe"] == 2


def test_memory_is_counted_in_shares_of_a_rank() -> None:
    for costs in (UNIT, DEEPSEEK_V3):
        question = Question(
            ranks=4, microbatches=8, costs=costs, layers=2, expansion=Expansion(overlap="off")
        )
        peaks = {
            name: max(ask(question, name).summary.peak) for name in ("gpipe", "1f1b", "dualpipev", "dualpipe")
        }
        assert peaks == pytest.approx({"gpipe": 8.0, "1f1b": 4.0, "dualpipev": 4.5, "dualpipe": 5.0})


def test_advice_names_the_fastest_and_the_leaner() -> None:
    answers, _ = ask_all(
        Question(ranks=4, microbatches=16, costs=DEEPSEEK_V3, layers=2), ("vpp+1", "dualpipev", "vpp")
    )
    text = " ".join(advise(answers))
    assert "vpp+1 is fastest" in text
    assert "mostly by less exposed communication" in text
    assert "dualpipev is" in text
    assert "less activation memory" in text
    assert advise(answers[:1]) == []


def test_two_copies_of_the_model_are_pointed_out() -> None:
    answers, _ = ask_all(Question(ranks=8, microbatches=20, costs=UNIT), ("dualpipe", "dualpipev", "1f1b"))
    assert any(
        "keeps two copies of the parameters; with one copy dualpipev" in line for line in advise(answers)
    )


def test_layers_must_fit_the_stages() -> None:
    with pytest.raises(ScheduleError, match="choose a number of layers that 2 divides"):
        ask(Question(ranks=4, microbatches=8, costs=DEEPSEEK_V3, layers=3), "zb-v")
    answers, refused = ask_all(
        Question(ranks=4, microbatches=8, costs=DEEPSEEK_V3, layers=3), ("zb-v", "1f1b")
    )
    assert [a.name for a in answers] == ["1f1b"]
    assert "zb-v" in refused


def made_up(name: str, makespan: float, peak: float, copies: int = 1) -> Answer:
    answer = ask(Question(ranks=1, microbatches=1, costs=UNIT), "1f1b")
    summary = replace(answer.summary, makespan=makespan, peak=(peak,))
    return replace(answer, name=name, summary=summary, model_copies=copies)


def test_a_leaner_one_is_nearly_as_fast_and_keeps_no_second_model() -> None:
    best, lean = made_up("best", 10.0, 4.0), made_up("lean", 10.9, 2.0)
    twice, slow = made_up("twice", 10.5, 1.0, copies=2), made_up("slow", 11.1, 1.0)
    told = advise([best, twice, lean, slow])
    assert told[1:] == [
        "lean is 9.0% slower and holds 50% less activation memory: take it if memory is short."
    ]
    assert len(advise([best, twice])) == len(advise([best, slow])) == 1
