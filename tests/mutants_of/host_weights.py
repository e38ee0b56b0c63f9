"""Mutants of weights in the host's memory: whose lie where, and who waits for whom."""

from __future__ import annotations

from mutants_of.mutant import Mutant

MUTANTS = (
    Mutant(
        "train/step/host_weights.py",
        "            self._coming.pop(number).get()\n",
        "            self._coming.pop(number)\n",
        "train/step/test_host_weights.py::test_the_same_bits_as_weights_that_stay",
        "weights that are on their way are not waited for",
        "experts compute with the weights of another layer",
    ),
    Mutant(
        "train/step/host_weights.py",
        "            after=max(behind, key=lambda one: one[0])[1] if behind else None,\n",
        "            after=None,\n",
        "train/step/test_host_weights.py::test_the_same_bits_as_weights_that_stay",
        "weights come to a buffer that what an update wrote has not left",
        "experts of one layer are stored as those of another",
    ),
    Mutant(
        "train/step/host_weights.py",
        "        self._here = [-1] * len(self._here)\n",
        "",
        "train/step/test_host_weights.py::test_a_checkpoint_of_either_goes_on_as_the_other",
        "a checkpoint is read to the host, and the ring keeps what it had",
        "the first layers of a resumed run compute with old weights",
    ),
    Mutant(
        "train/step/host_weights.py",
        "following if following < self.num_layers else number % self.slots",
        "min(following, self.num_layers - 1)",
        "train/step/test_host_weights.py::test_evaluation_between_steps_finds_every_layers_weights",
        "behind an evaluation the first layers do not come back",
        "each step and each evaluation begins by standing still",
    ),
    Mutant(
        "train/optim/buckets.py",
        "        return self.params if self.lent is None else self.lent.held\n",
        "        return self.params\n",
        "train/step/test_host_weights.py::test_a_checkpoint_is_written_from_the_hosts_memory",
        "who reads weights between steps finds those of whatever layer lies in the ring",
        "a checkpoint holds the experts of three layers, many times",
    ),
    Mutant(
        "train/predict/host_share.py",
        "    return (False,) if wrong or prod(axes) > 1 else (False, True)\n",
        "    return (False, True)\n",
        "train/predict/test_host_share.py::test_experts_leave_where_nothing_else_is_enough",
        "memory.place = auto sends experts away that cannot leave",
        "a run that would have been told that it may not fit stops while it is built",
    ),
    Mutant(
        "train/predict/step_program.py",
        "    return sum(sizes) - config.memory.buffers * max(sizes, default=0.0)\n",
        "    return sum(sizes)\n",
        "train/predict/test_host_share.py::test_weights_on_the_host_are_counted_and_priced",
        "the ring that weights visit is not counted",
        "what is said to fit does not",
    ),
    Mutant(
        "plan/step.py",
        "        way += self.weight_way * self.model.moe_layers[layer]\n",
        "",
        "train/predict/test_plan_config.py::test_weights_on_the_host_are_counted_and_priced_as_simulated",
        "experts come for nothing",
        "a plan of few tokens takes a fifth of its step",
    ),
)
