"""Mutants of report/: what a run is told to have done."""

from __future__ import annotations

from mutants_of.mutant import Mutant

MUTANTS = (
    Mutant(
        "report/page.py",
        'html.escape(f"{title} - MoEclipse"),',
        'f"{title} - MoEclipse",',
        "report/test_page.py::test_names_and_texts_stay_data",
    ),
    Mutant(
        "report/page.py",
        '    for mark in "<>&":',
        '    for mark in ">&":',
        "report/test_page.py::test_json_cannot_end_its_element",
    ),
    Mutant(
        "report/page.py",
        """\
    beside.write_text(page_of(runs), encoding="utf-8")
    beside.replace(path)""",
        '    path.write_text(page_of(runs), encoding="utf-8")',
        "report/test_page.py::test_whoever_looks_meanwhile_sees_a_whole_page",
    ),
    Mutant(
        "report/serve.py",
        '            if self.headers.get("Host") not in (f"{HERE}:{at}", f"localhost:{at}"):',
        '            if not str(self.headers.get("Host")).endswith(f":{at}"):',
        "report/test_serve.py::test_others_are_sent_away",
    ),
    Mutant(
        "report/serve.py",
        'f"{stat.st_size:x}.{stat.st_mtime_ns:x}"',
        'f"{stat.st_size:x}"',
        "report/test_serve.py::test_a_file_that_keeps_its_size_has_changed",
    ),
    Mutant(
        "report/figures.py",
        '        named = "" if where is None else f"rank {where}: "',
        '        named = f"rank {where}: " if where else ""',
        "report/test_figures.py::test_incidents_name_their_rank_the_first_one_too",
    ),
    Mutant(
        "report/measures.py",
        "    return over(np.sum, run.steps.column(name))",
        "    return over(np.sum, run.steps.column(name)[run.window])",
        "report/test_measures.py::test_what_is_counted_is_counted_from_the_first_step",
    ),
    Mutant(
        "report/measures.py",
        'ratio(mean(run, "hidden_ms"), mean(run, "comm_ms")) if comm',
        'ratio(mean(run, "hidden_ms"), mean(run, "step_ms")) if comm',
        "report/test_measures.py::test_parts_add_up_and_warmup_is_left_out",
    ),
    Mutant(
        "report/timeline.py",
        "    share = max(len(ranks) * len(turns), 1)",
        "    share = max(len(ranks), 1)",
        "report/test_timeline.py::test_times_are_those_of_one_step_of_one_rank",
    ),
    Mutant(
        "report/skew.py",
        "    return min(cost * above, float(np.median(straggle)))",
        "    return cost * above",
        "report/test_skew.py::test_uneven_ranks_cost_no_more_than_was_waited",
    ),
    Mutant(
        "report/fail_if.py",
        "        if value is None or not math.isfinite(value):\n",
        "        if value is None:\n",
        "report/test_fail_if.py::test_what_is_no_number_is_not_compared",
    ),
    Mutant(
        "report/fail_if.py",
        '/ (100 if word.endswith("%") else 1)',
        "/ 1",
        "report/test_fail_if.py::test_conditions_hold_or_not",
    ),
    Mutant(
        "report/intervals.py",
        "    computing = subtract(clip(compute, window), waits)",
        "    computing = clip(compute, window)",
        "report/test_intervals.py::test_waiting_for_a_late_peer_is_not_communication",
    ),
    Mutant(
        "report/intervals.py",
        "(max(t.launched, t.last_launched), t.done) for t",
        "(t.launched, t.done) for t",
        "report/test_intervals.py::test_waiting_for_a_late_peer_is_not_communication",
    ),
)
