"""Mutants of comm/: what travels."""

from __future__ import annotations

from mutants_of.mutant import Mutant

MUTANTS = (
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
)
