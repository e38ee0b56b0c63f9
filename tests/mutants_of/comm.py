"""Mutants of comm/: what travels."""

from __future__ import annotations

from mutants_of.mutant import Mutant

MUTANTS = (
    Mutant(
        "comm/meet.py",
        "                if word not in heard:",
        "                if len(heard) < num_ranks - 1:",
        "comm/test_meet.py::test_words_of_the_dead_are_answered_and_the_living_still_heard",
        "rank 0 answers the first word of each rank, and none that comes later",
        "after a restart ranks wait for an answer that was given to the dead",
    ),
    Mutant(
        "comm/failure.py",
        "            if cut_off := unreachable(others):",
        "            if cut_off := [rank for rank in unreachable(others) if rank < 0]:",
        "comm/test_failure.py::test_where_all_ranks_wait_the_network_is_asked",
        "whose network is cut is asked, and not told",
        "three ranks with a pulled cable name nobody",
    ),
    Mutant(
        "comm/start.py",
        "        graph.reset()",
        "        pass",
        "comm/test_start.py::test_graphs_are_gone_before_groups_are_left",
        "groups are left while graphs hold transfers of them",
        "a run on several GPUs over NCCL hangs behind its last step",
    ),
    Mutant(
        "comm/start.py",
        "    leaving.join(patience_s)",
        "    leaving.join()",
        "comm/test_start.py::test_a_lost_peer_does_not_keep_a_rank_from_leaving",
        "a rank that lost a peer takes its groups apart in good order",
        "behind a pulled cable a host goes on five minutes after it has said why not",
    ),
    Mutant(
        "comm/async_ops/record.py",
        "            return label.removesuffix(captured) + now if label.endswith(captured) else label\n",
        "            return label\n",
        "train/step/test_gathered_steps.py::test_a_microbatch_of_two_ranks_is_replayed",
        "a replayed graph tells the ledger of the microbatch that was captured",
        "checked runs end at the third microbatch",
    ),
    Mutant(
        "comm/async_ops/execute.py",
        "if (transfer := under_way.pop(dep, None)) is not None:",
        "if (transfer := under_way.get(dep)) is not None:",
        "comm/async_ops/test_execute.py::test_what_was_waited_for_is_forgotten",
        "transfers kept after they were waited for",
        "all microbatches' messages stay in memory until the step ends",
    ),
    Mutant(
        "comm/async_ops/execute.py",
        "for dep in op.deps:",
        "for dep in list(self._under_way):",
        "comm/async_ops/test_execute.py::test_an_op_waits_for_what_it_needs_and_for_nothing_else",
        "every op waits for all transfers before it",
        "nothing overlaps any more, anywhere",
    ),
    Mutant(
        "comm/async_ops/lane.py",
        "        transfer = Transfer(self, group, stamps, op, value, keep)\n        try:\n",
        "        transfer = Transfer(self, group, stamps, op, value, None)\n        try:\n",
        "comm/async_ops/test_lane.py::test_what_travels_is_kept_until_it_is_waited_for_and_no_longer",
        "a transfer does not keep its tensors",
        "memory is reused while a library still reads it: wrong rows, rarely",
    ),
    Mutant(
        "comm/async_ops/lane.py",
        """\
            self._stamps.done = time.perf_counter_ns()
        self._keep = self._work = None  # a Work may hold tensors, too
""",
        "            self._stamps.done = time.perf_counter_ns()\n",
        "comm/async_ops/test_lane.py::test_what_travels_is_kept_until_it_is_waited_for_and_no_longer",
        "a transfer keeps its tensors after the wait",
        "rows live as long as anybody keeps the transfer",
    ),
    Mutant(
        "comm/async_ops/lane.py",
        "            _stamp_when_done(transfer._work, stamps)\n",
        "            pass\n",
        "comm/async_ops/test_lane.py::test_a_transfer_is_done_when_it_is_done_not_when_somebody_looks",
        "transfers stamped when they are waited for",
        "reports call communication hidden that was long over",
    ),
    Mutant(
        "comm/async_ops/lane.py",
        "                    log.write_end(self._op)\n",
        "                    pass\n",
        "comm/async_ops/test_lane.py::test_what_the_host_launches_stands_in_the_file_with_its_times",
        "the file of a log never says that a transfer of the host ended",
        "whoever looks for a killed rank reads that all of its transfers hung",
    ),
    Mutant(
        "comm/async_ops/lane.py",
        "self._work.wait(timedelta(seconds=patience_s or watch.deadline_s))",
        "self._work.wait(timedelta(seconds=watch.deadline_s))",
        "comm/async_ops/test_lane.py::test_patience_replaces_the_deadline",
        "patience ignored",
        "saving a large checkpoint ends the run at the collective deadline",
    ),
    Mutant(
        "comm/async_ops/exchange.py",
        "    total = total.clone()\n",
        "",
        "comm/async_ops/test_exchange.py::test_a_sum_leaves_its_parts_as_they_came",
        "sums added in place into the first rank's part",
        "replicas share out rows by wrong counts once the loss was computed",
    ),
    Mutant(
        "comm/transports/two_level.py",
        'f"two_level {group.name} {numbers}"',
        'f"two_level {group.name}"',
        "comm/transports/test_two_level.py::test_another_layout_of_hosts_gets_groups_of_its_own",
        "two-level groups kept by group alone",
        "a second layout of hosts gets the first one's routes",
    ),
    Mutant(
        "comm/shared/signals.py",
        """\
        fence.release()
        words[word * WORD] = value
""",
        "        words[word * WORD] = value\n",
        "comm/shared/test_signals.py::test_a_post_comes_behind_a_release_and_sleepers_behind_a_full_fence",
        "a post without the fence before it",
        "on Arm a rank reads rows that are not there yet: wrong sums, rarely",
    ),
    Mutant(
        "comm/transports/ring.py",
        """\
            self._signals.fence.acquire()
            # Read after""",
        "            # Read after",
        "comm/transports/test_ring.py::test_messages_arrive_whole_and_in_order",
        "a receiver without the fence behind its look",
        "the same in exchanges",
    ),
    Mutant(
        "comm/watch/op_log.py",
        "os.posix_fallocate(file.fileno(), 0, size)",
        "file.truncate(size)",
        "comm/watch/test_op_log.py::test_a_disk_without_room_for_it_is_told_and_ends_no_process",
        "pages of the log are found room for when they are written",
        "a full disk for temporary files ends all ranks with SIGBUS",
    ),
    Mutant(
        "comm/watch/beats.py",
        "stands = found is not None and found == count",
        "stands = False",
        "comm/watch/test_beats.py::test_a_count_that_stands_still_for_the_deadline_is_a_rank_that_is_gone",
        "no count stands still",
        "a host that is lost during a save is waited for half an hour",
    ),
    Mutant(
        "comm/watch/op_log.py",
        "(op.patience_s or 0.0) > deadline_s",
        "op.patience_s is None",
        "comm/watch/test_beats.py::test_who_is_busy_is_waited_for_and_who_is_gone_is_not",
        "waits with patience are not looked at",
        "a host that is lost during a save is waited for half an hour",
    ),
)
