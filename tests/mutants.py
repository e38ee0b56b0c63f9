"""Changes that must not pass unnoticed: each is made in a copy of the source, and its test must fail there.

    .venv/bin/python tests/mutants.py           all of them, in a minute or two
    .venv/bin/python tests/mutants.py lane      those with "lane" in their file or their test

`docs/testing.md` says of each what would go wrong for a user. A mutant that survives means that its test has
become weaker; a mutant whose `old` text is gone must follow the code.

Python and torch are imported once: every mutant runs in a fork of this process, with the copy of the source
first on the path. So nothing of the package may be imported here.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path

import hypothesis  # noqa: F401  (imported once, for all forks)
import numpy  # noqa: F401
import pytest
import torch  # noqa: F401

ROOT = Path(__file__).parent.parent
PATIENCE_S = 120
TESTS_FAILED, NOT_TESTED = 1, 99
"""pytest returns the first when tests have run and failed; the second says that the copy was not tested."""


@dataclass(frozen=True)
class Mutant:
    file: str
    """Below src/moeclipse."""
    old: str
    """Stands exactly once in the file."""
    new: str
    test: str
    """Below tests; it must fail with the change, and passes without."""

    @property
    def source(self) -> str:
        return (ROOT / "src" / "moeclipse" / self.file).read_text()

    @property
    def changed(self) -> str:
        return self.source.replace(self.old, self.new)


MUTANTS = (
    Mutant(
        "moe/optimizer_state.py",
        "    if value.shape == parameter.shape:\n        return ExpertShards(value, place)\n",
        "    if value.shape == parameter.shape:\n        return value\n",
        "own_loop/test_checkpoints.py::test_a_run_goes_on_at_another_layout",
    ),
    Mutant(
        "moe/shards.py",
        "            if given.place != self:\n",
        "            if given.local.shape[0] != len(self.experts):\n",
        "moe/test_shards.py::test_experts_refuse_those_of_another_rank",
    ),
    Mutant(
        "tensor/linear.py",
        """\
        if d_x is not None and tp.size > 1:
            travelling = reduce_input_grad(tp, d_x, label)
        parameters = [*weights, *ctx.biases]
        grads = _submit(tp, parameters, wanted, [*dys_TN, *dys_TN], x_TD, num)
""",
        """\
        parameters = [*weights, *ctx.biases]
        grads = _submit(tp, parameters, wanted, [*dys_TN, *dys_TN], x_TD, num)
        if d_x is not None and tp.size > 1:
            travelling = reduce_input_grad(tp, d_x, label)
""",
        "tensor/test_linear_order.py::test_exchanges_travel_under_the_products_that_do_not_need_them",
    ),
    Mutant(
        "tensor/linear.py",
        """\
            if not tp.overlap:
                whole.get()
""",
        "            whole.get()\n",
        "tensor/test_linear_order.py::test_exchanges_travel_under_the_products_that_do_not_need_them",
    ),
    Mutant(
        "tensor/linear.py",
        """\
    if not hidden:
        travelling.get()
""",
        "",
        "tensor/test_linear_order.py::test_without_overlap_each_exchange_ends_before_the_next_product",
    ),
    Mutant(
        "schedule/templates.py",
        "kinds.MLP_R, kinds.MLP_B, kinds.DISPATCH_B, kinds.MLP_W)",
        "kinds.MLP_R, kinds.MLP_B, kinds.MLP_W, kinds.DISPATCH_B)",
        "schedule/test_templates.py::test_a_pair_is_launched_in_the_order_of_the_table",
    ),
    Mutant(
        "schedule/templates.py",
        """\
            if back:
                yield from b.each(back - 1, kinds.COMBINE_B)
            yield from b.each(back, kinds.SHARED_W, kinds.ROUTE_W, kinds.ATTN_W)
""",
        """\
            yield from b.each(back, kinds.SHARED_W, kinds.ROUTE_W, kinds.ATTN_W)
            if back:
                yield from b.each(back - 1, kinds.COMBINE_B)
""",
        "schedule/test_templates.py::test_a_pair_is_launched_in_the_order_of_the_table",
    ),
    Mutant(
        "schedule/templates.py",
        """\
    yield from b.by_chunk(last, kinds.HEAD_B, kinds.COMBINE_B)
    yield from b.each(last, kinds.HEAD_W)
""",
        """\
    yield from b.each(last, kinds.HEAD_B, kinds.HEAD_W)
    yield from b.each(last, kinds.COMBINE_B)
""",
        "schedule/test_templates.py::test_an_action_alone_is_launched_in_the_order_of_the_table",
    ),
    Mutant(
        "schedule/check.py",
        "        check_launches(program)\n",
        "",
        "schedule/test_fuzz.py::test_no_broken_mutant_passes",
    ),
    Mutant(
        "schedule/check.py",
        "                    ops[source].comm is not None and source not in awaited\n",
        "                    False\n",
        "schedule/test_check.py::test_a_transfer_has_ended_for_who_waits_for_it_alone",
    ),
    Mutant(
        "schedule/op_graph.py",
        "            if before is not None and ops[before].lane != op.lane:\n",
        "            if before is not None and ops[before].lane != op.lane and not shared:\n",
        "schedule/test_op_graph.py::test_one_communicator_for_both_ways_is_refused_exactly_where_it_hangs",
    ),
    Mutant(
        "balance/shadow_model.py",
        "backward_compute=rows * costs.row_backward",
        "backward_compute=rows * costs.row_forward",
        "balance/test_shadow.py::test_the_prediction_adds_up",
    ),
    Mutant(
        "balance/shadow_model.py",
        "(costs.row_backward, costs.gradient_seconds)",
        "(costs.row_forward, costs.gradient_seconds)",
        "balance/test_shadow_model.py::test_the_walk_is_led_by_the_prices_of_the_prediction",
    ),
    Mutant(
        "balance/shadow_model.py",
        "row = 4 * self.row_send",
        "row = 2 * self.row_send",
        "balance/test_shadow_model.py::test_enough_rows_cost_as_much_as_a_copy",
    ),
    Mutant(
        "moe/shadow_choice.py",
        "if self.automatic and (costs is None or not asks):",
        "if self.automatic and costs is None:",
        "moe/test_shadow_choice.py::test_even_loads_are_left_in_peace_and_skew_is_seen_with_the_next_look",
    ),
    Mutant(
        "balance/shadow.py",
        "if after.total > (1 - costs.min_gain) * before.total:",
        "if after.total > before.total:",
        "balance/test_shadow.py::test_a_small_gain_is_not_worth_it",
    ),
    Mutant(
        "balance/draft.py",
        "sign * draft.problem.state_seconds",
        "0 * draft.problem.state_seconds",
        "balance/test_incremental.py::test_optimizer_state_must_pay_for_its_move",
    ),
    Mutant(
        "balance/objective.py",
        "return max([*enter, *leave], default=0.0)",
        "return sum(enter)",
        "balance/test_objective.py::test_a_migration_takes_as_long_as_its_busiest_link",
    ),
    Mutant(
        "train/placement/background_plan.py",
        'self.pending = None if saved is None else int(saved["asked"])',
        "self.pending = None",
        "train/placement/test_background_plan.py::test_a_plan_under_way_is_saved_and_taken_at_its_step",
    ),
    Mutant(
        "balance/objective.py",
        "weights * self.weight_bytes + states * self.state_bytes",
        "weights * self.weight_bytes",
        "balance/test_objective.py::test_moved_state_is_paid_for",
    ),
    Mutant(
        "balance/objective.py",
        "busiest_rank = float(near_PP.sum()) / placement.num_ranks",
        "busiest_rank = float(near_PP.sum())",
        "balance/test_objective.py::test_on_a_shared_wire_a_rank_has_its_part_of_all_rows",
    ),
    Mutant(
        "balance/objective.py",
        "part = (replicas - 1) / replicas",
        "part = replicas - 1.0",
        "balance/test_objective.py::test_replicas_share_the_exchange_of_gradients",
    ),
    Mutant(
        "balance/ownership.py",
        "grains = even_bounds(-(-size // self.grain), self.parts)",
        "grains = [0, *[-(-size // self.grain)] * self.parts]",
        "balance/test_ownership.py::test_parts_are_even_and_begin_at_grains",
    ),
    Mutant(
        "balance/load.py",
        "decay ** np.arange(len(rows) - 1, -1, -1)",
        "decay ** np.arange(len(rows))",
        "balance/test_load.py::test_what_was_known_before_the_last_step_counts_new_steps_most",
    ),
    Mutant(
        "balance/load.py",
        "[i for i, recorded in enumerate(self.steps) if recorded % self.every == 0]",
        "list(range(0, len(self.steps), 2))",
        "balance/test_load.py::test_a_trace_of_a_resumed_run_is_thinned_to_even_distances",
    ),
    Mutant(
        "comm/flight/execute.py",
        "transfer = self._under_way.pop(position, None)",
        "transfer = self._under_way.get(position)",
        "comm/flight/test_execute.py::test_what_was_waited_for_is_forgotten",
    ),
    Mutant(
        "comm/flight/execute.py",
        "for dep in op.deps:",
        "for dep in list(self._under_way):",
        "comm/flight/test_execute.py::test_an_op_waits_for_what_it_needs_and_for_nothing_else",
    ),
    Mutant(
        "comm/flight/lane.py",
        "self._value, self._keep = value, keep",
        "self._value, self._keep = value, None",
        "comm/flight/test_lane.py::test_what_travels_is_kept_until_it_is_waited_for_and_no_longer",
    ),
    Mutant(
        "comm/flight/lane.py",
        """\
            self._stamps.done = time.perf_counter_ns()
        self._keep = self._work = None  # a Work may hold tensors, too
""",
        "            self._stamps.done = time.perf_counter_ns()\n",
        "comm/flight/test_lane.py::test_what_travels_is_kept_until_it_is_waited_for_and_no_longer",
    ),
    Mutant(
        "comm/flight/lane.py",
        "            _stamp_when_done(transfer._work, stamps)\n",
        "            pass\n",
        "comm/flight/test_lane.py::test_a_transfer_is_done_when_it_is_done_not_when_somebody_looks",
    ),
    Mutant(
        "comm/flight/lane.py",
        "self._work.wait(timedelta(seconds=patience_s or watch.deadline_s))",
        "self._work.wait(timedelta(seconds=watch.deadline_s))",
        "comm/flight/test_lane.py::test_patience_replaces_the_deadline",
    ),
    Mutant(
        "comm/flight/exchange.py",
        "    total = total.clone()\n",
        "",
        "comm/flight/test_exchange.py::test_a_sum_leaves_its_parts_as_they_came",
    ),
    Mutant(
        "comm/wires/two_level.py",
        'f"two_level {group.name} {numbers}"',
        'f"two_level {group.name}"',
        "comm/wires/test_two_level.py::test_another_layout_of_hosts_gets_groups_of_its_own",
    ),
    Mutant(
        "moe/dispatch.py",
        "if unit.local and self._all is None:",
        "if False:",
        "moe/test_overlap.py::test_rows_travel_while_experts_compute",
    ),
    Mutant(
        "moe/dispatch_combine.py",
        """\
            if op.step is None:  # the last ones: every unit has its score gradients
                self.return_scores()
            self.wgrad(op.step)
""",
        """\
            self.wgrad(op.step)
            if op.step is None:  # the last ones: every unit has its score gradients
                self.return_scores()
""",
        "moe/test_overlap.py::test_rows_travel_while_experts_compute",
    ),
    Mutant(
        "moe/passes.py",
        "return self.forward if len(self.call.plan.units) == 1 else WAITED_FOR_LATER",
        "return self.forward",
        "moe/test_passes.py::test_a_pipeline_leaves_the_waiting_for_units_to_the_experts",
    ),
    Mutant(
        "moe/dispatch_combine.py",
        """\
        if not keep_rows:
            self.arrived = []  # what backward needs of them is in `saved`
""",
        "",
        "moe/test_passes.py::test_pieces_of_two_microbatches_give_the_bits_of_one_go",
    ),
    Mutant(
        "moe/schedule.py",
        "overlap=0.0 if one_go else 1.0",
        "overlap=1.0",
        "moe/test_schedule.py::test_an_exchange_in_one_go_hides_no_shadows",
    ),
    Mutant(
        "moe/shadow_choice.py",
        "row_forward=pairs * costs.row_forward, row_backward=pairs * costs.row_backward",
        "row_forward=costs.row_forward, row_backward=costs.row_backward",
        "moe/test_shadow_choice.py::test_shadows_are_priced_per_row_that_travels",
    ),
    Mutant(
        "moe/probe.py",
        "if self.shared_wire else 1 / self.link",
        "if self.shared_wire else 1 / self.bandwidth",
        "moe/test_probe.py::test_a_link_is_priced_as_it_is_around_a_busy_expert",
    ),
    Mutant(
        "moe/schedule.py",
        "use = self.use if self.trials is None else self.trials.unseen",
        "use = self.use",
        "moe/test_schedule.py::test_a_run_that_is_saved_amid_its_trials_goes_on_with_the_best_prediction",
    ),
    Mutant(
        "pipeline/runtime.py",
        "if form is Form.B and chunk == 0:",
        "if False:",
        "pipeline/test_what_is_kept.py::test_nothing_of_a_microbatch_outlives_its_last_op",
    ),
    Mutant(
        "pipeline/runtime.py",
        "            del self._passes[at.stage, at.microbatch]\n",
        "            pass\n",
        "pipeline/test_what_is_kept.py::test_nothing_of_a_microbatch_outlives_its_last_op",
    ),
    Mutant(
        "pipeline/runtime.py",
        "one.layers[at.layer] = Finished(one.layers[at.layer].gradient())",
        "pass",
        "pipeline/test_what_is_kept.py::test_nothing_of_a_microbatch_outlives_its_last_op",
    ),
    Mutant(
        "pipeline/runtime.py",
        "found, one.d_out = one.d_out, None",
        "found = one.d_out",
        "pipeline/test_what_is_kept.py::test_nothing_of_a_microbatch_outlives_its_last_op",
    ),
    Mutant(
        "pipeline/backward.py",
        "        self._outputs = self.outputs = ()\n",
        "",
        "pipeline/test_backward.py::test_a_segment_lets_go_in_backward",
    ),
    Mutant(
        "pipeline/runtime.py",
        "mesh.pipe(op.kind.form.name, source, target)",
        'mesh.pipe("F", source, target)',
        "pipeline/test_runtime.py::test_activations_and_gradients_never_share_a_communicator",
    ),
    Mutant(
        "pipeline/config.py",
        "or layer < self.recompute_layers",
        "or layer <= self.recompute_layers",
        "pipeline/test_overlap.py::test_only_the_first_layers_run_again",
    ),
    Mutant(
        "comm/shared/signals.py",
        """\
        fence.release()
        words[word * WORD] = value
""",
        "        words[word * WORD] = value\n",
        "comm/shared/test_signals.py::test_a_post_comes_behind_a_release_and_sleepers_behind_a_full_fence",
    ),
    Mutant(
        "comm/wires/ring.py",
        """\
            self._signals.fence.acquire()
            # Read after""",
        "            # Read after",
        "comm/wires/test_ring.py::test_messages_arrive_whole_and_in_order",
    ),
    Mutant(
        "ops/raw_bytes.py",
        "x.as_strided((x.numel(),), (1,))",
        "x.view(-1)",
        "comm/wires/test_copy_engines.py::test_one_element_travels_whatever_its_stride",
    ),
    Mutant(
        "moe/order.py",
        "half_of_bits(scores_TK).flatten()",
        "scores_TK.detach().flatten()",
        "moe/test_topology.py::test_last_bits_do_not_decide_who_may_leave",
    ),
    Mutant(
        "train/config.py",
        """return "placement.reduce = 'fedavg'" if config.placement.reduce == "fedavg" else ""
""",
        """return ""
""",
        "train/placement/test_fedavg.py::test_what_a_replica_learns_from_is_no_matter_of_speed",
    ),
)


def run(folder: str, test: str) -> None:
    """In a fork: pytest on one test, with the copy of the source."""
    code = NOT_TESTED
    try:
        os.chdir(ROOT)
        os.environ["PYTHONPATH"] = folder  # for processes that the test starts
        os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = f"{folder}/hypothesis"
        sys.path.insert(0, folder)
        with open(f"{folder}/output", "w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        found = pytest.main(["-q", "-x", "-p", "no:cacheprovider", f"tests/{test}"])
        here = str(getattr(sys.modules.get("moeclipse"), "__file__", "nowhere"))
        code = int(found) if here.startswith(folder) else NOT_TESTED
        print("NOT_TESTED" if code == NOT_TESTED else f"tested {here}", flush=True)
    finally:
        os._exit(code)


def is_noticed(mutant: Mutant) -> tuple[Mutant, bool, str]:
    """(the mutant, whether its test fails with it, what pytest said)"""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "src" / "moeclipse", f"{folder}/moeclipse")
        file = Path(folder) / "moeclipse" / mutant.file
        file.write_text(mutant.changed)
        shutil.rmtree(file.parent / "__pycache__", ignore_errors=True)
        process = multiprocessing.get_context("fork").Process(target=run, args=(folder, mutant.test))
        process.start()
        process.join(PATIENCE_S)
        if process.is_alive():
            process.kill()
            return mutant, False, f"no answer within {PATIENCE_S} s"
        said = Path(folder, "output").read_text()
    return mutant, process.exitcode == TESTS_FAILED, said


def main(words: list[str]) -> int:
    wanted = [m for m in MUTANTS if all(word in f"{m.file} {m.test}" for word in words)]
    began, survivors = time.monotonic(), 0
    with ThreadPool(os.cpu_count() or 1) as pool:
        for mutant, noticed, said in pool.imap(is_noticed, wanted):
            print(f"{'noticed' if noticed else 'SURVIVED'}  {mutant.file}  {mutant.test}", flush=True)
            if not noticed:
                survivors += 1
                print(f"{mutant.old}\n    became\n{mutant.new}\n{said}", flush=True)
    print(f"{len(wanted)} mutants, {survivors} survived, {time.monotonic() - began:.0f} s")
    return 1 if survivors or not wanted else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
