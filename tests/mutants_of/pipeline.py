"""Mutants of pipeline/: stages."""

from __future__ import annotations

from mutants_of.mutant import Mutant

MUTANTS = (
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
        "pipeline/overlap.py",
        "            head=index == len(layers) - 1,",
        "            head=index == len(layers),",
        """\
pipeline/test_overlap.py::test_a_program_has_the_head_behind_its_last_layer_and_chunks_outside_pairs""",
    ),
)
