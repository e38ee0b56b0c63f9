"""Mutants of sim/: simulated time."""

from __future__ import annotations

from mutants_of.mutant import Mutant

MUTANTS = (
    Mutant(
        "sim/step_costs.py",
        "self.link.seconds(self.work.layer.tokens * self.row_bytes / self.work.tp)",
        "self.link.seconds(self.work.layer.tokens * self.row_bytes)",
        "sim/test_step_costs.py::test_axes_share_work_and_add_communication",
    ),
    Mutant(
        "sim/step_costs.py",
        "self.link.seconds(2 * number * GRADIENT_BYTES * (ranks - 1) / ranks)",
        "self.link.seconds(number * GRADIENT_BYTES * (ranks - 1) / ranks)",
        "sim/test_step_costs.py::test_axes_share_work_and_add_communication",
    ),
    Mutant(
        "sim/compare.py",
        "        and answer.model_copies <= best.model_copies\n",
        "",
        "sim/test_compare.py::test_a_leaner_one_is_nearly_as_fast_and_keeps_no_second_model",
    ),
    Mutant(
        "sim/compare.py",
        "CLOSE * best.summary.makespan",
        "2 * CLOSE * best.summary.makespan",
        "sim/test_compare.py::test_a_leaner_one_is_nearly_as_fast_and_keeps_no_second_model",
    ),
    Mutant(
        "sim/compare.py",
        "        seconds = {kind: value / share for kind, value in question.costs.seconds.items()}",
        "        seconds = dict(question.costs.seconds)",
        "sim/test_compare.py::test_every_schedule_does_the_same_work",
    ),
    Mutant(
        "sim/engine.py",
        "len(costs.rank_speed) != program.num_ranks:",
        "len(costs.rank_speed) < program.num_ranks:",
        "sim/test_engine.py::test_slow_ranks_and_uneven_stages",
    ),
    Mutant(
        "sim/durations.py",
        "    return sum(scales) / len(scales)",
        "    return max(scales)",
        "sim/test_durations.py::test_a_pair_has_the_mean_of_its_stages",
    ),
    Mutant(
        "sim/durations.py",
        "        seconds = seconds / np.repeat(",
        "        seconds = seconds * np.repeat(",
        "sim/test_durations.py::test_columns_have_the_durations_of_their_ops",
    ),
    Mutant(
        "sim/durations.py",
        "    seconds = seconds + fixed[columns.kind]\n",
        "",
        "sim/test_durations.py::test_columns_have_the_durations_of_their_ops",
    ),
    Mutant(
        "sim/exchange.py",
        "    return max(sends, sum(rank in shadow.ranks for shadow in shadows))",
        "    return sends + sum(rank in shadow.ranks for shadow in shadows)",
        "sim/test_exchange.py::test_copies_travel_both_ways_at_once",
    ),
    Mutant(
        "sim/events.py",
        "                if other != op.lane or count > 1:",
        "                if other != op.lane:",
        "sim/test_events.py::test_two_wires_of_one_rank_can_share_its_link",
    ),
    Mutant(
        "sim/trace.py",
        '        "dur": (finish - start) * scale,',
        '        "dur": (finish - start) * 1e6,',
        "sim/test_trace.py::test_a_trace_has_one_clock_whatever_the_unit_of_its_costs",
    ),
    Mutant(
        "sim/trace.py",
        '"ts": float(t) * scale,',
        '"ts": float(t) * 1e6,',
        "sim/test_trace.py::test_a_trace_has_one_clock_whatever_the_unit_of_its_costs",
    ),
)
