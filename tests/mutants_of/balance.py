"""Mutants of balance/: plans."""

from __future__ import annotations

from mutants_of.mutant import Mutant

MUTANTS = (
    Mutant(
        "balance/shadow_model.py",
        "backward_compute=rows * costs.row_backward",
        "backward_compute=rows * costs.row_forward",
        "balance/test_shadow.py::test_the_prediction_adds_up",
        "backward compute priced as forward in the prediction",
        "shadows are refused or granted by half of their worth",
    ),
    Mutant(
        "balance/shadow_model.py",
        "(costs.row_backward, costs.gradient_seconds)",
        "(costs.row_forward, costs.gradient_seconds)",
        "balance/test_shadow_model.py::test_the_walk_is_led_by_the_prices_of_the_prediction",
        "the same in the policy's smooth stand-in",
        "the walk prefers other experts than the prediction does",
    ),
    Mutant(
        "balance/shadow_model.py",
        "row = 4 * self.row_send",
        "row = 2 * self.row_send",
        "balance/test_shadow_model.py::test_enough_rows_cost_as_much_as_a_copy",
        "a row priced for two transfers, not four",
        "ranks that would profit from a copy get none",
    ),
    Mutant(
        "balance/shadow.py",
        "if after.total > (1 - costs.min_gain) * before.total:",
        "if after.total > before.total:",
        "balance/test_shadow.py::test_a_small_gain_is_not_worth_it",
        "any gain is enough for a shadow",
        "weights travel for a gain within the error of the costs",
    ),
    Mutant(
        "balance/draft.py",
        "sign * draft.problem.state_seconds",
        "0 * draft.problem.state_seconds",
        "balance/test_incremental.py::test_optimizer_state_must_pay_for_its_move",
        "moved optimizer state need not pay",
        "training stalls at each plan",
    ),
    Mutant(
        "balance/objective.py",
        "return max([*enter, *leave], default=0.0)",
        "return sum(enter)",
        "balance/test_objective.py::test_a_migration_takes_as_long_as_its_busiest_link",
        "moves priced one after the other",
        "experts stay",
    ),
    Mutant(
        "balance/objective.py",
        "weights * self.weight_bytes + states * self.state_bytes",
        "weights * self.weight_bytes",
        "balance/test_objective.py::test_moved_state_is_paid_for",
        "optimizer state travels for nothing",
        "training stalls at each plan, of every planner",
    ),
    Mutant(
        "balance/objective.py",
        "busiest_rank = float(near_PP.sum()) / placement.num_ranks",
        "busiest_rank = float(near_PP.sum())",
        "balance/test_objective.py::test_on_a_shared_wire_a_rank_has_its_part_of_all_rows",
        "a shared wire priced as if one rank carried all rows",
        "plans give up balance",
    ),
    Mutant(
        "balance/objective.py",
        "part = (replicas - 1) / replicas",
        "part = replicas - 1.0",
        "balance/test_objective.py::test_replicas_share_the_exchange_of_gradients",
        "replicas pay for all gradients",
        "hot experts get none",
    ),
    Mutant(
        "balance/ownership.py",
        "grains = even_bounds(-(-size // self.grain), self.parts)",
        "grains = [0, *[-(-size // self.grain)] * self.parts]",
        "balance/test_ownership.py::test_parts_are_even_and_begin_at_grains",
        "one replica owns everything",
        "its rank gets all gradients",
    ),
    Mutant(
        "balance/load.py",
        "decay ** np.arange(len(rows) - 1, -1, -1)",
        "decay ** np.arange(len(rows))",
        "balance/test_load.py::test_what_was_known_before_the_last_step_counts_new_steps_most",
        "old steps count most in what was known before",
        "`moeclipse place` judges planners by loads of long ago",
    ),
    Mutant(
        "balance/load.py",
        "[i for i, recorded in enumerate(self.steps) if recorded % self.every == 0]",
        "list(range(0, len(self.steps), 2))",
        "balance/test_load.py::test_a_trace_of_a_resumed_run_is_thinned_to_even_distances",
        "a trace thinned by position, not by step",
        "heat maps of resumed runs have a bent time axis",
    ),
)
