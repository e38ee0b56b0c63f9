"""Mutants of model/: the model."""

from __future__ import annotations

from mutants_of.mutant import Mutant

MUTANTS = (
    Mutant(
        "model/sampling.py",
        "before_BV >= config.top_p, 0)",
        "before_BV > config.top_p, 0)",
        "model/test_sampling.py::test_tokens_come_as_often_as_they_should",
        "one token beyond top_p",
        "unlikely tokens are written",
    ),
    Mutant(
        "model/rotary.py",
        'return yarn_magnitude(self.factor) if self.scaling == "yarn" else 1.0',
        "return 1.0",
        "model/test_rotary.py::test_yarn_keeps_fast_pairs_and_scales_slow_ones",
        "yarn's factor on cos and sin is left out",
        "models with yarn compute something else than theirs",
    ),
    Mutant(
        "model/rotary.py",
        "stretch[..., None] ** (self.width / (self.width - 2))",
        "stretch[..., None]",
        "model/test_rotary.py::test_linear_and_dynamic_scaling",
        "dynamic scaling without its exponent",
        "the same, for long texts",
    ),
    Mutant(
        "model/cache.py",
        "            return self.place_BS - (window - 1)",
        "            return self.place_BS - window",
        "model/test_cache.py::test_who_sees_what",
        "a window of one key more in the cache",
        "texts are written by another model than was trained",
    ),
    Mutant(
        "model/cache.py",
        "return self.place_BS - self.place_BS % self.segment - memory",
        "return self.place_BS - memory",
        "model/test_cache.py::test_who_sees_what",
        "memory counted from the token, not from its segment",
        "the same, for models with memory",
    ),
    Mutant(
        "model/count.py",
        "always + num_moe * gate.top_k * expert",
        "always + num_moe * moe.num_experts * expert",
        "model/test_count.py::test_parameter_count_by_formula",
        "a token uses all experts",
        "active parameters, and with them MFU, several times too high",
    ),
    Mutant(
        "model/flops.py",
        '(name == "embedding" and not tied)',
        'name == "embedding"',
        "model/test_flops.py::test_a_tied_embedding_is_a_product_too",
        "the head of a tied model is no product",
        "MFU of tied models too low",
    ),
    Mutant(
        "model/flops.py",
        "            if not is_frozen(name):\n",
        "            if name:\n",
        "model/test_flops.py::test_what_is_frozen_is_not_updated",
        "frozen weights have gradients of their own",
        "runs with adapters take 169 % of what the work allows",
    ),
    Mutant(
        "model/flops.py",
        '"mfu": self.flops / (step_s * device.flops * num_ranks),',
        '"mfu": self.flops / (step_s * device.flops * device.efficiency * num_ranks),',
        "model/test_flops.py::test_speed_is_of_all_ranks",
        "MFU of what products reach, not of the peak",
        "a figure that compares with nobody's",
    ),
    Mutant(
        "model/blocks.py",
        "self.init_std / math.sqrt(2 * max(self.num_layers, 1))",
        "self.init_std / math.sqrt(max(self.num_layers, 1))",
        "model/test_blocks.py::test_what_writes_to_the_residual_stream_shrinks_with_depth",
        "the residual stream grows with depth",
        "deep models start less stable",
    ),
    Mutant(
        "model/attention.py",
        "            weight = weight + (adapter.scale",
        "            weight = weight + 0 * (adapter.scale",
        "train/weights/test_lora.py::test_so_does_latent_attention_on_a_base_in_few_bits",
        "the latent is read without its adapter",
        "texts are written by another model than the one that was trained",
    ),
)
