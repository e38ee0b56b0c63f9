"""Mutants of plan/: the order of an exchange."""

from __future__ import annotations

from mutants_of.mutant import Mutant

MUTANTS = (
    Mutant(
        "plan/search.py",
        "            if best is None or seconds < best[0] * (1 - 1e-9):",
        "            if best is None or seconds <= best[0]:",
        "plan/test_search.py::test_where_all_orders_are_alike_the_plainest_is_taken",
    ),
    Mutant(
        "plan/search.py",
        """\
        if found < seconds * (1 - 1e-9):
            seconds, rule, verified""",
        """\
        if found <= seconds:
            seconds, rule, verified""",
        "plan/test_search.py::test_where_all_orders_are_alike_the_plainest_is_taken",
    ),
    Mutant(
        "plan/search.py",
        "np.random.default_rng(0)",
        "np.random.default_rng()",
        "plan/test_search.py::test_swaps_are_the_same_on_every_rank",
    ),
    Mutant(
        "plan/search.py",
        "longest[key] = max(longest.get(key, 0.0), spent)",
        "longest[key] = spent",
        "plan/test_search.py::test_johnson_asks_the_busiest_rank_of_each_unit",
    ),
    Mutant(
        "plan/search.py",
        "key=lambda s: -ends(s)[1])",
        "key=lambda s: ends(s)[1])",
        "plan/test_search.py::test_johnson_puts_the_short_way_in_first_and_the_short_way_out_last",
    ),
    Mutant(
        "plan/search.py",
        """\
        if found < seconds * (1 - 1e-9):
            verified, seconds = other, found""",
        """\
        if found < seconds * (1 - 1e-9):
            verified = other""",
        "plan/test_search.py::test_the_choice_is_the_best_tried_and_search_only_improves",
    ),
    Mutant(
        "plan/search.py",
        "        bound=lower_bound(verified.program, counts, costs),",
        "        bound=seconds,",
        "plan/test_search.py::test_the_bound_is_that_of_the_busiest_lane",
    ),
    Mutant(
        "plan/search.py",
        "for left, right in pairs[:swaps]:",
        "for left, right in pairs:",
        "plan/test_search.py::test_no_more_swaps_are_tried_than_allowed",
    ),
    Mutant(
        "plan/search.py",
        '        orders["ends"] = end_units(shape.num_steps, shape.chunks)',
        '        orders["ends"] = ring',
        "plan/test_search.py::test_own_group_at_both_ends_wins_where_near_links_are_faster",
    ),
    Mutant(
        "plan/search.py",
        "    if not chunks or min(chunks) < 1:",
        "    if not chunks:",
        "plan/test_search.py::test_bad_input_is_refused",
    ),
)
