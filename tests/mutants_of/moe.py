"""Mutants of moe/: layers with experts."""

from __future__ import annotations

from mutants_of.mutant import Mutant

MUTANTS = (
    Mutant(
        "moe/own_loop/microbatch_threads.py",
        "            self._unread[number] = [UnreadLosses() for _ in self.layers]",
        "            self._unread[number] = [layer.unread for layer in self.layers]",
        "own_loop/test_overlap_of_microbatches.py::test_gradients_are_those_of_the_plain_loop",
        "microbatches that take turns share the losses that nobody has asked for",
        "aux_loss of one counts another one's, and gates learn from wrong gradients",
    ),
    Mutant(
        "moe/exchange/dispatch_combine.py",
        "            self.guests.collect(now, self.d_out_TO)\n",
        "            self.guests.collect(now[:1], self.d_out_TO)\n",
        "moe/experts/test_served.py::test_rows_of_others_change_nothing",
        "of shadows that serve others only the first unit's gradients go back",
        "hot experts learn from a part of their tokens alone",
    ),
    Mutant(
        "moe/exchange/gathered.py",
        "    mine = (ids_TK >= 0) & (place_TK >= 0) & (place_TK < num)\n",
        "    mine = (place_TK >= 0) & (place_TK < num)\n",
        "moe/exchange/test_gathered.py::test_experts_that_move_are_found_where_they_are",
        "choices of nobody are those of expert 0",
        "dropped rows and filled-up tokens train it",
    ),
    Mutant(
        "moe/exchange/gathered.py",
        "        return None, None, None, back(d_scores, D_SCORES, first), *found\n",
        "        back(d_scores, D_SCORES, first)\n        return None, None, None, None, *found\n",
        "moe/exchange/test_gathered.py::test_gradients_are_those_of_one_process",
        "gradients of scores are summed and forgotten",
        "the gate learns from its auxiliary loss alone",
    ),
    Mutant(
        "moe/tokens.py",
        "        return max(self._of_ranks[self.group.ranks.index(rank)] for rank in group.ranks)\n",
        "        return local\n",
        "moe/exchange/test_gathered.py::test_a_layer_in_a_loop_of_ones_own",
        "ranks gather as many tokens as each has itself",
        "ranks with other numbers of tokens mix them up, or hang",
    ),
    Mutant(
        "moe/experts/pairwise.py",
        "        expert_n = torch.where(expert_n < 0, num_experts, expert_n)  # those of nobody come last\n",
        "        expert_n = expert_n.clamp(min=0)\n",
        "moe/experts/test_local.py::test_outputs_and_gradients_are_those_of_the_definition",
        "a dropped choice visits expert 0",
        "tokens over capacity train an expert that they were kept from",
    ),
    Mutant(
        "moe/layer.py",
        "late = isinstance(self.gate, Gate) and self.gate.compiles and self.dispatcher.table is None",
        "late = self.dispatcher.table is None",
        "moe/exchange/test_loads.py::test_three_small_messages_are_one_unless_a_gate_must_know_before",
        "token counts are sent behind a gate that asks for them",
        "gates with a capacity fail at their first call",
    ),
    Mutant(
        "moe/own_loop/optimizer_state.py",
        "    if value.shape == parameter.shape:\n        return ExpertShards(value, place)\n",
        "    if value.shape == parameter.shape:\n        return value\n",
        "own_loop/test_checkpoints.py::test_a_run_goes_on_at_another_layout",
        "state saved as plain tensors",
        "all load one rank's moments",
    ),
    Mutant(
        "moe/own_loop/shards.py",
        "            if given.place != self:\n",
        "            if given.local.shape[0] != len(self.experts):\n",
        "moe/own_loop/test_shards.py::test_experts_refuse_those_of_another_rank",
        "only sizes compared",
        "ranks take others' experts",
    ),
    Mutant(
        "moe/tune/shadow_choice.py",
        "if self.automatic and (costs is None or not asks):",
        "if self.automatic and costs is None:",
        "moe/tune/test_shadow_choice.py::test_even_loads_are_left_in_peace_and_skew_is_seen_with_the_next_look",
        "every call asks for counts",
        "6 % of a step under even loads",
    ),
    Mutant(
        "moe/exchange/dispatch.py",
        "if unit.local and self._all is None:",
        "if False:",
        "moe/test_overlap.py::test_rows_travel_while_experts_compute",
        "own rows wait for the scores of others",
        "the first unit no longer hides the first transfers",
    ),
    Mutant(
        "moe/exchange/dispatch_combine.py",
        """\
        if op.step is None and self.guests is None:  # the last ones: every unit has its score gradients
            self.return_scores()
        self.wgrad(op.step)
""",
        """\
        self.wgrad(op.step)
        if op.step is None and self.guests is None:  # the last ones: every unit has its score gradients
            self.return_scores()
""",
        "moe/test_overlap.py::test_rows_travel_while_experts_compute",
        "score gradients leave behind the last dW",
        "their exchange is exposed at the end of every backward",
    ),
    Mutant(
        "moe/exchange/pipeline_pieces.py",
        "return self.forward if len(self.call.plan.units) == 1 else WAITED_FOR_LATER",
        "return self.forward",
        "moe/exchange/test_pipeline_pieces.py::test_a_pipeline_leaves_the_waiting_for_units_to_the_experts",
        "a pipeline waits for all units before the experts run",
        "the smart schedule hides nothing inside a pipeline",
    ),
    Mutant(
        "moe/exchange/dispatch_combine.py",
        "self.arrived = self.arrived if keep_rows else []",
        "pass",
        "moe/exchange/test_pipeline_pieces.py::test_pieces_of_two_microbatches_give_the_bits_of_one_go",
        "rows kept as they arrived until backward",
        "activations of every layer grow by the rows received",
    ),
    Mutant(
        "moe/tune/exchange_policy.py",
        "overlap=0.0 if one_go else 1.0",
        "overlap=1.0",
        "moe/tune/test_exchange_policy.py::test_an_exchange_in_one_go_hides_no_shadows",
        "a blocking exchange hides shadows",
        "too few shadows",
    ),
    Mutant(
        "moe/tune/shadow_choice.py",
        "forward, backward = pairs * costs.row_forward, pairs * costs.row_backward",
        "forward, backward = costs.row_forward, costs.row_backward",
        "moe/tune/test_shadow_choice.py::test_shadows_are_priced_per_row_that_travels",
        "a row priced as one pair",
        "too few shadows",
    ),
    Mutant(
        "moe/tune/probe.py",
        "if self.shared_wire else 1 / self.link",
        "if self.shared_wire else 1 / self.bandwidth",
        "moe/tune/test_probe.py::test_a_link_is_priced_as_it_is_around_a_busy_expert",
        "a link priced as if all ranks sent",
        "on switched networks copies look dear around a busy expert, and are not made",
    ),
    Mutant(
        "moe/tune/cut_choice.py",
        "use = self.use if self.trials is None else self.trials.without_times",
        "use = self.use",
        "moe/tune/test_exchange_policy.py::test_a_run_that_is_saved_amid_its_trials_goes_on_with_the_best_prediction",
        "a run saved amid its trials keeps the candidate at hand",
        "a resumed run is stuck with a granularity that was only being tried",
    ),
    Mutant(
        "moe/gate/routing.py",
        "half_of_bits(scores_TK).flatten()",
        "scores_TK.detach().flatten()",
        "moe/gate/test_node_limit.py::test_last_bits_do_not_decide_who_may_leave",
        "scores compared to the last bit",
        "smart and blocking train different models where scores decide",
    ),
    Mutant(
        "moe/tune/stopwatch.py",
        "if longer > SURE * noise else Slope(None, 1.0)",
        "if longer > 0 else Slope(more / 1e-7, 0.0)",
        "moe/tune/test_stopwatch.py::test_a_slope_is_known_where_it_is_larger_than_chance",
        "a slope that was not found is a number",
        "experts are lent and moved over wires of terabytes per second",
    ),
    Mutant(
        "moe/tune/cut_choice.py",
        "            return max(LEAST_GAIN, scatter)\n",
        "            return max(LEAST_GAIN, min(MOST_SCATTER, scatter))\n",
        "moe/tune/test_cut_choice.py::test_a_busy_machine_takes_the_same_decision_again",
        "five per cent are enough, however calls scatter",
        "on a busy machine equal runs cut their rows otherwise",
    ),
    Mutant(
        "moe/losses.py",
        "        if self._over or not loss.requires_grad or y.requires_grad != self._graph:",
        "        if not loss.requires_grad or y.requires_grad != self._graph:",
        "moe/test_losses.py::test_losses_that_nobody_asks_for_do_not_pile_up",
        "a forward is never over",
        "losses of all steps are summed, and their graphs fill the memory",
    ),
    Mutant(
        "moe/tune/stopwatch.py",
        """\
        mine, problem = [0.0] * count, f"rank {mesh.rank}: {type(error).__name__}: {error}"
""",
        "        raise CannotMeasure(str(error)) from None\n",
        "train/run/test_choices.py::test_experts_that_fail_while_they_are_priced_leave_no_rank_waiting",
        "a rank whose experts fail leaves what all measure together",
        "a run that is over hangs, or mixes up what ranks tell each other, before its summary is written",
    ),
    Mutant(
        "moe/experts/served.py",
        "return sums + more, Parts(own=saved, guests=guests, rows=pairs)",
        "return sums, Parts(own=saved, guests=guests, rows=pairs)",
        "moe/experts/test_served.py::test_by_kernels",
        "what guests compute by kernels is not added",
        "tokens of hot experts lose a part of their output",
    ),
    Mutant(
        "moe/experts/served.py",
        "return [d_rows_RD + more_RD], torch.cat([d_score_M, scores_M]), pending",
        "return [d_rows_RD], torch.cat([d_score_M, scores_M]), pending",
        "moe/experts/test_served.py::test_by_kernels",
        "gradients of rows that guests computed by kernels are left out",
        "layers below learn from a part of the tokens of hot experts",
    ),
)
