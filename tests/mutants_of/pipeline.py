"""Mutants of pipeline/: stages."""

from __future__ import annotations

from mutants_of.mutant import Mutant

MUTANTS = (
    Mutant(
        "pipeline/runtime.py",
        "if form is Form.B and chunk == 0:",
        "if False:",
        "pipeline/test_what_is_kept.py::test_nothing_of_a_microbatch_outlives_its_last_op",
        "sent activations kept to the end of the step",
        "memory of the first stages grows with the number of microbatches",
    ),
    Mutant(
        "pipeline/runtime.py",
        "            del self._passes[at.stage, at.microbatch]\n",
        "            pass\n",
        "pipeline/test_what_is_kept.py::test_nothing_of_a_microbatch_outlives_its_last_op",
        "a microbatch's pass kept after its last op",
        "inputs of all microbatches stay until the step ends",
    ),
    Mutant(
        "pipeline/runtime.py",
        "one.layers[at.layer] = Finished(one.layers[at.layer].gradient())",
        "pass",
        "pipeline/test_what_is_kept.py::test_nothing_of_a_microbatch_outlives_its_last_op",
        "a finished layer kept until its stage has finished",
        "gradients of all layers of a stage are alive together",
    ),
    Mutant(
        "pipeline/runtime.py",
        "found, one.d_out = one.d_out, None",
        "found = one.d_out",
        "pipeline/test_what_is_kept.py::test_nothing_of_a_microbatch_outlives_its_last_op",
        "the head's gradient kept until the stage has finished",
        "one more activation is alive on the last stage",
    ),
    Mutant(
        "pipeline/backward.py",
        "        self._outputs = self.outputs = ()\n",
        "",
        "pipeline/test_backward.py::test_a_segment_lets_go_in_backward",
        "a segment keeps its outputs after backward",
        "schedules that put W off (zb-h1, zb-v) hold outputs until then",
    ),
    Mutant(
        "pipeline/runtime.py",
        "mesh.pipe(op.kind.form.name, source, target)",
        'mesh.pipe("F", source, target)',
        "pipeline/test_runtime.py::test_activations_and_gradients_never_share_a_communicator",
        "activations and gradients share a communicator",
        "on NCCL a receive posted early blocks the send behind it: a deadlock at scale",
    ),
    Mutant(
        "pipeline/config.py",
        "or layer < self.recompute_layers",
        "or layer <= self.recompute_layers",
        "pipeline/test_overlap.py::test_only_the_first_layers_run_again",
        "recompute_layers takes in one layer more",
        "slower than asked for, and 0 is not none",
    ),
    Mutant(
        "pipeline/overlap.py",
        "            head=index == len(layers) - 1,",
        "            head=index == len(layers),",
        """\
pipeline/test_overlap.py::test_a_program_has_the_head_behind_its_last_layer_and_chunks_outside_pairs""",
        "the head is no op of its own",
        "it is computed in one go with the last layer: its dW hides nothing",
    ),
    Mutant(
        "pipeline/overlap.py",
        "num = len(self.stages) // self.num_chains",
        "num = len(self.stages)",
        "pipeline/test_overlap.py::test_two_copies_of_the_model_are_laid_out_in_opposite_directions",
        "an evaluation runs through both copies of a model",
        "its loss is that of a model twice as deep",
        survived=True,
    ),
)
