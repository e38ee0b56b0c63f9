"""Mutants of model/: the model."""

from __future__ import annotations

from mutants_of.mutant import Mutant

MUTANTS = (
    Mutant(
        "model/sampling.py",
        "before_BV >= config.top_p, 0)",
        "before_BV > config.top_p, 0)",
        "model/test_sampling.py::test_tokens_come_as_often_as_they_should",
    ),
    Mutant(
        "model/rotary.py",
        'return yarn_magnitude(self.factor) if self.scaling == "yarn" else 1.0',
        "return 1.0",
        "model/test_rotary.py::test_magnitude_of_yarn",
    ),
    Mutant(
        "model/rotary.py",
        "base *= stretch ** (self.width / (self.width - 2))",
        "base *= stretch",
        "model/test_rotary.py::test_linear_and_dynamic_scaling",
    ),
    Mutant(
        "model/cache.py",
        "            return self.place_BS - (window - 1)",
        "            return self.place_BS - window",
        "model/test_cache.py::test_who_sees_what",
    ),
    Mutant(
        "model/cache.py",
        "return self.place_BS - self.place_BS % self.segment - memory",
        "return self.place_BS - memory",
        "model/test_cache.py::test_who_sees_what",
    ),
    Mutant(
        "model/count.py",
        "always + num_moe * gate.top_k * expert",
        "always + num_moe * moe.num_experts * expert",
        "model/test_count.py::test_parameter_count_by_formula",
    ),
    Mutant(
        "model/flops.py",
        "        looked_up = 0 if model.tie_embeddings else model",
        "        looked_up = model",
        "model/test_flops.py::test_a_tied_embedding_is_a_product_too",
    ),
    Mutant(
        "model/flops.py",
        '"mfu": self.flops / (step_s * device.flops * num_ranks),',
        '"mfu": self.flops / (step_s * device.flops * device.efficiency * num_ranks),',
        "model/test_flops.py::test_speed_is_of_all_ranks",
    ),
    Mutant(
        "model/blocks.py",
        "self.init_std / math.sqrt(2 * max(self.num_layers, 1))",
        "self.init_std / math.sqrt(max(self.num_layers, 1))",
        "model/test_blocks.py::test_what_writes_to_the_residual_stream_shrinks_with_depth",
    ),
)
