"""Mutants of plan/: the order of an exchange; state on the host."""

from __future__ import annotations

from mutants_of.mutant import Mutant

MUTANTS = (
    Mutant(
        "plan/step.py",
        "way = self.input_way * (0 < layer < self.model.num_layers - 1)",
        "way = 0.0",
        "train/predict/test_plan_config.py::test_inputs_on_the_host_are_counted_and_priced_as_simulated",
        "the way of inputs costs nothing",
        "over a slow wire a plan is chosen that takes times as long as it says",
    ),
    Mutant(
        "plan/rank_bytes.py",
        "stays = {0, model.num_layers - 1} if layout.inputs else range(model.num_layers)",
        "stays = range(model.num_layers)",
        "train/predict/test_plan_config.py::test_inputs_on_the_host_are_counted_and_priced_as_simulated",
        "inputs on the host take the device's memory all the same",
        "what would fit is not found",
    ),
    Mutant(
        "plan/search.py",
        "            if best is None or seconds < best[0] * (1 - 1e-9):",
        "            if best is None or seconds <= best[0]:",
        "plan/test_search.py::test_where_all_orders_are_alike_the_plainest_is_taken",
        "of equals the last is taken",
        "eight times the ops where cutting wins nothing",
        survived=True,
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
        "a search that found nothing counts as the choice",
        "reports say `search` where a rule decided",
        survived=True,
    ),
    Mutant(
        "plan/search.py",
        "np.random.default_rng(0)",
        "np.random.default_rng()",
        "plan/test_search.py::test_swaps_are_the_same_on_every_rank",
        "each rank draws its own swaps",
        "ranks choose different orders: the exchange hangs",
        survived=True,
    ),
    Mutant(
        "plan/search.py",
        "longest[key] = max(longest.get(key, 0.0), spent)",
        "longest[key] = spent",
        "plan/test_search.py::test_johnson_asks_the_busiest_rank_of_each_unit",
        "Johnson's rule asks the last rank alone",
        "orders that are good for one rank and bad for the busiest",
        survived=True,
    ),
    Mutant(
        "plan/search.py",
        "key=lambda s: -ends(s)[1])",
        "key=lambda s: ends(s)[1])",
        "plan/test_search.py::test_johnson_puts_the_short_way_in_first_and_the_short_way_out_last",
        "the long way out last",
        "the last exchange is exposed",
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
        "swaps are all held against the first order",
        "the search undoes what it found",
    ),
    Mutant(
        "plan/search.py",
        "        bound=lower_bound(verified.program, counts, costs),",
        "        bound=seconds,",
        "plan/test_search.py::test_the_bound_is_that_of_the_busiest_lane",
        "the bound is what was found",
        "reports say that nothing is left to gain",
        survived=True,
    ),
    Mutant(
        "plan/search.py",
        "for left, right in pairs[:swaps]:",
        "for left, right in pairs:",
        "plan/test_search.py::test_no_more_swaps_are_tried_than_allowed",
        "the budget of swaps is ignored",
        "planning takes minutes on many ranks",
        survived=True,
    ),
    Mutant(
        "plan/search.py",
        '        orders["ends"] = end_units(shape.num_steps, shape.chunks)',
        '        orders["ends"] = ring',
        "plan/test_search.py::test_own_group_at_both_ends_wins_where_near_links_are_faster",
        "own rows at the first end alone",
        "the last exchange goes over the slow links, exposed",
    ),
    Mutant(
        "plan/search.py",
        "    if not chunks or min(chunks) < 1:",
        "    if not chunks:",
        "plan/test_search.py::test_bad_input_is_refused",
        "0 chunks are taken",
        "a division by zero instead of a sentence",
        survived=True,
    ),
    Mutant(
        "plan/step.py",
        "beside + slowed * moved",
        "beside",
        "plan/test_step.py::test_an_exchange_slows_what_stands_beside_it",
        "an exchange takes no processors",
        "layouts with overlap look faster than they are",
        survived=True,
    ),
    Mutant(
        "plan/step.py",
        "pair=max(prices.pair, host),",
        "pair=prices.pair,",
        "plan/test_step.py::test_a_host_that_is_slow_is_waited_for",
        "pairs are launched in no time",
        "small microbatches look fast",
    ),
    Mutant(
        "plan/layouts.py",
        "        if plan.peak > plan.room:",
        "        if False:",
        "plan/test_layouts.py::test_what_the_exact_count_refuses_is_no_plan",
        "plans that do not fit are shown",
        "the run ends out of memory",
    ),
    Mutant(
        "plan/step.py",
        "            weight * np.array(self._simulated(number, rank))\n",
        "            weight * np.array(self._simulated(number, self.busiest(number)))\n",
        "plan/test_step.py::test_what_is_exposed_is_of_one_rank",
        "compute and exposed time are extrapolated through two ranks",
        "a plan shows exposed time below zero",
    ),
    Mutant(
        "plan/state_place.py",
        "        return most if most <= 1 and most * self.each * max(owned) + taken <= self.host_room",
        "        return most if most <= 1",
        "plan/test_state_place.py::test_the_share_is_the_smallest_with_which_every_rank_fits",
        "the host's memory has no end",
        "a plan that pins more than a host has",
    ),
    Mutant(
        "plan/state_place.py",
        "math.ceil(100 * (peak + ring - room)",
        "math.ceil(100 * (peak - room)",
        "plan/test_state_place.py::test_the_share_is_the_smallest_with_which_every_rank_fits",
        "the ring takes no room",
        "the run ends out of memory",
    ),
    Mutant(
        "plan/rank_bytes.py",
        "    return tuple(each.peak - away * each.owned + ring for each in counts)",
        "    return tuple(each.peak - away * each.owned for each in counts)",
        "plan/test_layouts.py::test_state_leaves_for_the_host_where_the_device_is_too_small",
        "a plan's peak is without the ring",
        "less is told than a run takes",
    ),
    Mutant(
        "plan/rank_bytes.py",
        "        layout = replace(layout, budget=max(min(most, most_budget(layout)), 1))",
        "        layout = replace(layout, budget=most_budget(layout))",
        "plan/test_layouts.py::test_a_budget_is_what_there_is_room_for",
        "zb-m holds what there is no room for",
        "the schedule for tight memory is never found",
    ),
)
