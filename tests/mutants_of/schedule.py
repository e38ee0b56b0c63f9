"""Mutants of schedule/: order."""

from __future__ import annotations

from mutants_of.mutant import Mutant

MUTANTS = (
    Mutant(
        "schedule/grad_travel.py",
        "if op.kind.form not in (Form.B, Form.W) or",
        "if op.kind.form is not Form.F or",
        "schedule/test_grad_travel.py::test_what_is_read_before_it_came_or_overwritten_before_it_left_is_refused",
        "nobody asks whether a gradient has left before another takes its memory",
        "a program that loses gradients is proved",
    ),
    Mutant(
        "schedule/grad_travel.py",
        "found.append(earlier[-slots] if key is not None and len(earlier) >= slots else -1)",
        "found.append(earlier[-1] if key is not None and len(earlier) >= slots else -1)",
        "schedule/test_grad_travel.py::test_turns_go_round_among_those_that_are_alike",
        "all layers but the first ones take one buffer",
        "what is simulated is not what runs",
    ),
    Mutant(
        "schedule/layer_by_layer.py",
        "    ops += [backward(stage, m) for stage in reversed(range(last)) for m in M]  # 3",
        "    ops += [backward(stage, m) for m in M for stage in reversed(range(last))]  # 3",
        "schedule/test_layer_by_layer.py::test_a_layer_is_updated_before_the_next_ones_gradients_begin",
        "backward goes microbatch by microbatch",
        "gradients of all layers have to be kept",
    ),
    Mutant(
        "schedule/needs.py",
        "        return [] if before is None else [(kinds.BUCKET_STORE, op.stage, None, None, before)]\n",
        "        return []\n",
        "schedule/test_state_travel.py::"
        "test_what_is_used_before_it_came_or_overwritten_while_it_is_read_is_refused",
        "a fetch does not wait for the store of what is in its buffer",
        "state of another bucket is stored over that of the first",
    ),
    Mutant(
        "schedule/needs.py",
        "if step.next_forward and op.kind is kinds.ATTN_F else []",
        "if False else []",
        "schedule/test_state_travel.py::test_a_layer_that_reads_weights_before_their_update_is_refused",
        "a layer's forward does not wait for the update of its weights",
        "it reads weights of the step before",
    ),
    Mutant(
        "schedule/needs.py",
        "        came = [(kinds.BUCKET_FETCH, op.stage, None, None, number)]\n",
        "        came = []\n",
        "schedule/test_state_travel.py::"
        "test_what_is_used_before_it_came_or_overwritten_while_it_is_read_is_refused",
        "an update does not wait for its state",
        "weights are updated with the moments of other weights",
    ),
    Mutant(
        "schedule/input_travel.py",
        "        found.setdefault(fetch, []).extend(places[InputKey.of(ops[before])].done)\n",
        "        pass\n",
        "schedule/test_input_travel.py::"
        "test_what_is_used_before_it_came_or_overwritten_while_it_is_read_is_refused",
        "a fetch does not wait for the last reader of its buffer",
        "a layer runs again from the input of another one",
    ),
    Mutant(
        "schedule/input_travel.py",
        "            found.setdefault(store, []).append(fetch_of[before_it])\n",
        "            pass\n",
        "schedule/test_input_travel.py::test_regions_of_the_host_are_taken_again_by_the_next_microbatch",
        "a store does not wait for the fetch from its place on the host",
        "a microbatch gets the input of the next one",
    ),
    Mutant(
        "schedule/weight_travel.py",
        "        before = (buffer.reader, left.get(buffer.number), left.get(number))\n",
        "        before = (left.get(buffer.number), left.get(number))\n",
        "schedule/test_weight_travel.py::"
        "test_what_is_read_before_it_came_or_overwritten_while_it_is_read_is_refused",
        "a fetch of weights does not wait for the last reader of its buffer",
        "experts compute with the weights of another layer",
    ),
    Mutant(
        "schedule/weight_travel.py",
        "        before = (buffer.reader, left.get(buffer.number), left.get(number))\n",
        "        before = (buffer.reader, left.get(number))\n",
        "schedule/test_weight_travel.py::"
        "test_what_is_read_before_it_came_or_overwritten_while_it_is_read_is_refused",
        "a fetch does not wait until what an update wrote has left its buffer",
        "the host keeps weights of another layer",
    ),
    Mutant(
        "schedule/weight_travel.py",
        "            found[position] = [] if buffer.came is None else [buffer.came]\n",
        "            found[position] = []\n",
        "schedule/test_weight_travel.py::"
        "test_what_is_read_before_it_came_or_overwritten_while_it_is_read_is_refused",
        "nobody waits for weights that are on their way",
        "experts compute with the weights of another layer",
    ),
    Mutant(
        "schedule/weight_travel.py",
        "            if buffer.number != number:\n",
        "            if False:\n",
        "schedule/test_weight_travel.py::test_a_copy_that_is_left_out_is_missed",
        "a list without a fetch is proved",
        "experts compute with the weights of another layer",
    ),
    Mutant(
        "schedule/weight_travel.py",
        "        if buffer[-1].number != slot:\n",
        "        if False:\n",
        "schedule/test_weight_travel.py::test_below_what_is_trained_weights_come_for_forward_alone",
        "the first layers do not come back at the end of a step",
        "the next step stands still at its first layer",
    ),
    Mutant(
        "schedule/templates.py",
        "kinds.MLP_R, kinds.MLP_B, kinds.DISPATCH_B, kinds.MLP_W)",
        "kinds.MLP_R, kinds.MLP_B, kinds.MLP_W, kinds.DISPATCH_B)",
        "schedule/test_templates.py::test_a_pair_is_launched_in_the_order_of_the_table",
        "dW(MLP) before dispatch of B in a pair",
        "dispatch of B starts late where compute runs inline",
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
        "dW before the next combine of B in a pair",
        "the same for combine",
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
        "the head's dW before the first combine of B",
        "the first combine of every backward is exposed",
    ),
    Mutant(
        "schedule/check.py",
        "        check_launches(program)\n",
        "",
        "schedule/test_fuzz.py::test_no_broken_mutant_passes",
        "groups, members and peers are not checked",
        "a program that leaves ranks out is run",
    ),
    Mutant(
        "schedule/check.py",
        "                    ops[source].comm is not None and source not in awaited\n",
        "                    False\n",
        "schedule/test_check.py::test_a_transfer_has_ended_for_who_waits_for_it_alone",
        "a transfer counts as ended once a later one of its lane has",
        "programs that read too early on gloo pass",
    ),
    Mutant(
        "schedule/op_graph.py",
        "            if before is not None and ops[before].lane != op.lane:\n",
        "            if before is not None and ops[before].lane != op.lane and not shared:\n",
        "schedule/test_op_graph.py::test_one_communicator_for_both_ways_is_refused_exactly_where_it_hangs",
        "shared communicators hold nothing back",
        "programs that stand still over NCCL pass",
    ),
    Mutant(
        "schedule/lower.py",
        "place[target][message] - LOOKAHEAD)",
        "place[target][message])",
        "schedule/test_lower.py::test_receives_are_posted_one_action_ahead",
        "receives posted when they are needed",
        "every transfer between stages is exposed",
    ),
    Mutant(
        "schedule/memory.py",
        "        return taken / op.chunks, given / op.chunks",
        "        return taken, given",
        "schedule/test_memory.py::test_every_op_says_what_it_holds",
        "each chunk holds the whole",
        "peaks of cut programs are too high: what fits is refused",
    ),
    Mutant(
        "schedule/legal.py",
        """\
        Rule(text="at least two microbatches per rank", holds=lambda s: s.M >= 2 * s.P),
    ),
    "dualpipev": (""",
        """\
        Rule(text="at least two microbatches per rank", holds=lambda s: s.M > 2 * s.P),
    ),
    "dualpipev": (""",
        "schedule/test_legal.py::test_rules_by_hand",
        "dualpipe wants one microbatch more than it needs",
        "a legal layout is refused",
    ),
    Mutant(
        "schedule/interleaved.py",
        "    G, T = max(groups), local_order(V, groups)",
        "    G, T = groups[0], local_order(V, groups)",
        "schedule/test_interleaved.py::test_any_number_of_microbatches_runs",
        "warm-up follows the first group",
        "a pipeline with uneven groups stands still",
    ),
    Mutant(
        "schedule/zero_bubble.py",
        "            if i + 1 - done > factor * r:",
        "            if i + 1 - done > r:",
        "schedule/test_zero_bubble.py::test_no_rank_of_zb_h2_waits_between_its_first_and_its_last_action",
        "zb-h2 leaves no more weight gradients open than zb-h1",
        "its memory buys nothing",
    ),
    Mutant(
        "schedule/budget.py",
        "rank.forwards == self.M or rank.held >= rank.budget",
        "rank.forwards == self.M or rank.held > rank.budget",
        "schedule/test_budget.py::test_one_microbatch_at_a_time",
        "one microbatch more than the budget is held",
        "a run that was told what fits runs out of memory",
    ),
    Mutant(
        "schedule/launch.py",
        "there = num_places - 1 - place if self.mirrored and axis in SHARING else place",
        "there = place",
        "schedule/test_launch.py::test_of_two_copies_places_share_parameters_two_by_two",
        "a program of two directions reduces inside a stage",
        "what is proved and simulated is not what runs",
    ),
    Mutant(
        "schedule/launch.py",
        "places = 2 if self.mirrored and axis in SHARING else 1",
        "places = 1",
        "schedule/test_launch.py::test_of_two_copies_places_share_parameters_two_by_two",
        "a reduction over both places is priced as of one",
        "dualpipe looks faster than it is",
    ),
    Mutant(
        "schedule/launch.py",
        '"replicas", "expert_grads")',
        '"replicas")',
        "schedule/test_launch.py::test_axes_are_the_groups_of_a_mesh",
        "adapters of experts are shared inside a stage alone",
        "the ledger ends a run that is right",
        survived=True,
    ),
    Mutant(
        "schedule/shape.py",
        "return range(chain * share, (chain + 1) * share)",
        "return range(share)",
        "schedule/test_shape.py::test_chains_share_the_microbatches",
        "both directions take the first half of the microbatches",
        "half of the tokens count twice, the others never",
    ),
    Mutant(
        "schedule/shape.py",
        """\
self.layers[:per_copy]), initial=0)
        return list(islice(begins, per_copy)) * self.placement.num_chains""",
        """\
self.layers), initial=0)
        return list(islice(begins, self.placement.num_stages))""",
        "schedule/test_shape.py::test_both_chains_begin_with_the_first_layer",
        "the second direction goes on where the first ends",
        "a run of dualpipe whose launches are checked ends in its first step",
        survived=True,
    ),
    Mutant(
        "schedule/dualpipe.py",
        "(2 * P - 1 - r, K)  #",
        "(2 * P - 1 - r, 0)  #",
        "schedule/test_dualpipe.py::test_two_directions_by_hand",
        "the second direction begins with the first microbatch",
        "the program is refused, or tokens count twice",
    ),
    Mutant(
        "schedule/dualpipe.py",
        "(2 * P - 1 - r, K)  #",
        "(P + r, K)  #",
        "schedule/test_dualpipe.py::test_two_directions_by_hand",
        "the second direction goes the way of the first",
        "activations are sent to ranks that hold other layers",
    ),
    Mutant(
        "schedule/dualpipe.py",
        "(down, up) if r < P // 2 else (up, down)",
        "(down, up)",
        "schedule/test_dualpipe.py::test_two_directions_by_hand",
        "the second half of the ranks begins with the far direction",
        "the pipeline stands still",
    ),
    Mutant(
        "schedule/folded.py",
        "while left[rank] and (ready > now[rank] or (not back and held[rank] >= limit)):",
        "while left[rank] and ready > now[rank]:",
        "schedule/test_folded.py::test_with_little_room_a_fold_is_a_fifth_faster_than_one_stage_a_rank",
        "dW gives no activations back where the budget is used up",
        "orders that would keep it are given up",
    ),
    Mutant(
        "schedule/folded.py",
        "        if not back and held[rank] >= limit:\n            return None\n",
        "",
        "schedule/test_folded.py::test_any_budget_is_kept_with_any_number_of_stages",
        "an order that has no room goes on",
        "a run that was told what fits runs out of memory",
    ),
    Mutant(
        "schedule/folded.py",
        "order[:2] < best[0]",
        "order[:2] > best[0]",
        "schedule/test_folded.py::test_with_little_room_a_fold_is_a_fifth_faster_than_one_stage_a_rank",
        "the longest order is taken",
        "a step takes half as long again",
    ),
)
