"""Mutants of cost/: prices."""

from __future__ import annotations

from mutants_of.mutant import Mutant

MUTANTS = (
    Mutant(
        "cost/model.py",
        "        share = (num_ranks - 1) / num_ranks\n",
        "        share = 1.0\n",
        "cost/test_model.py::test_layer_costs_follow_the_shape",
    ),
    Mutant(
        "cost/model.py",
        '        seconds[f"{part}_W"] = (flops - core) / rate',
        '        seconds[f"{part}_W"] = flops / rate',
        "cost/test_model.py::test_layer_costs_follow_the_shape",
    ),
    Mutant(
        "cost/model.py",
        "        return 2.0 * self.tokens * self.sequence * self.attn_width",
        "        return 4.0 * self.tokens * self.sequence * self.attn_width",
        "cost/test_model.py::test_a_causal_mask_leaves_half_of_attention",
    ),
    Mutant(
        "cost/model.py",
        'for form in "FBR"}',
        'for form in "FB"}',
        "cost/test_model.py::test_every_chunk_of_an_exchange_pays_its_latency",
    ),
    Mutant(
        "cost/model.py",
        "    left = 1 - comm_processors / device.processors",
        "    left = comm_processors / device.processors",
        "cost/test_model.py::test_processors_that_communicate_compute_nothing",
    ),
    Mutant(
        "cost/model.py",
        "            if not 0 < rate <= 1:",
        "            if not 0 <= rate <= 1:",
        "cost/test_model.py::test_processors_that_communicate_compute_nothing",
    ),
    Mutant(
        "cost/exchange.py",
        "return self._latency(near=False) + copies",
        "return self._latency(near=True) + copies",
        "cost/test_exchange.py::test_what_goes_far_pays_the_far_latency",
    ),
    Mutant(
        "cost/exchange.py",
        "near or self.far_latency is None else",
        "near or not self.far_latency else",
        "cost/test_exchange.py::test_what_goes_far_pays_the_far_latency",
    ),
    Mutant(
        "cost/hardware.py",
        "num_bytes / (self.bandwidth * self.efficiency)",
        "num_bytes / self.bandwidth",
        "cost/test_hardware.py::test_a_link_reaches_a_part_of_its_peak",
    ),
    Mutant(
        "cost/hardware.py",
        "memory_bandwidth=2 * block.nbytes / copy",
        "memory_bandwidth=block.nbytes / copy",
        "cost/test_hardware.py::test_a_copy_reads_and_writes",
    ),
    Mutant(
        "cost/file.py",
        'fixed={**costs.fixed, **data.get("fixed", {})}',
        "fixed=costs.fixed",
        "cost/test_file.py::test_what_a_file_gives_wins_over_what_follows_from_a_shape",
    ),
    Mutant(
        "cost/file.py",
        "isinstance(value, kind) and 0 <= value < MOST",
        "isinstance(value, kind) and value >= 0",
        "cost/test_file.py::test_costs_can_be_added_up",
    ),
    Mutant(
        "cost/file.py",
        '            slowed, busy = key.split("/")',
        '            busy, slowed = key.split("/")',
        "cost/test_file.py::test_a_file_with_a_table",
    ),
)
