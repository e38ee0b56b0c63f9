"""Mutants of hf/: Hugging Face folders."""

from __future__ import annotations

from mutants_of.mutant import Mutant

MUTANTS = (
    Mutant(
        "hf/write.py",
        "        if groups[-1] and sum(other.num_bytes for other in groups[-1]) + tensor.num_bytes > most:",
        "        if groups[-1] and sum(other.num_bytes for other in groups[-1]) > most:",
        "hf/test_write.py::test_files_are_cut_by_size_and_read_by_others",
        "a file may be larger than asked for by one tensor",
        "files break the limit that others set for them",
    ),
    Mutant(
        "hf/write.py",
        "    total = sum(tensor.num_bytes for group in shards.values() for tensor in group)",
        "    total = max(sum(tensor.num_bytes for tensor in group) for group in shards.values())",
        "hf/test_write.py::test_files_are_cut_by_size_and_read_by_others",
        "the index tells the size of the largest file",
        "others plan too little memory for the model",
    ),
    Mutant(
        "hf/write.py",
        "(values.t() if part.transposed else values)",
        "(values.reshape(values.t().shape) if part.transposed else values)",
        "hf/test_write.py::test_tensors_are_assembled_from_parts",
        "a transposed part is only reshaped",
        "exported gpt-oss experts are scrambled",
    ),
    Mutant(
        "hf/write.py",
        """\
"data_offsets": [offset, offset + tensor.num_bytes],
        }
        offset += tensor.num_bytes""",
        """\
"data_offsets": [offset, offset + tensor.num_bytes],
        }
        offset = tensor.num_bytes""",
        "hf/test_write.py::test_tensors_of_a_file_lie_one_behind_the_other",
        "tensors of a file lie over each other",
        "nobody can read the file",
        survived=True,
    ),
    Mutant(
        "hf/manifest.py",
        "        if found != expected:",
        "        if len(found) != len(expected):",
        "hf/test_manifest.py::test_changed_missing_and_unreadable",
        "digests are not compared",
        "a damaged download is trained from",
    ),
    Mutant(
        "hf/manifest.py",
        "[share::num_shares]",
        "[share + 1 :: num_shares]",
        "hf/test_manifest.py::test_changed_missing_and_unreadable",
        "the first file is nobody's share",
        "the same, for one file",
    ),
    Mutant(
        "hf/config_file.py",
        ' and not (path / "manifest.json").exists()',
        "",
        "hf/test_config_file.py::test_a_checkpoint_of_ours_is_no_model_folder",
        "a checkpoint with a config.json is taken for a model folder",
        "`--init-from` reads it as one, and fails",
        survived=True,
    ),
    Mutant(
        "hf/config_file.py",
        "    if tokenizer and not any(name in found for name in NEEDED):",
        "    if tokenizer and not found:",
        "hf/test_config_file.py::test_small_files",
        "any small file passes for a tokenizer",
        "a converted model cannot read a text",
    ),
    Mutant(
        "hf/rope.py",
        'yarn_magnitude(factor, given["mscale_all_dim"]) ** 2',
        'yarn_magnitude(factor, given["mscale_all_dim"])',
        "hf/test_rope.py::test_part_of_a_head_and_latent_attention",
        "the scale of latent attention is not squared",
        "DeepSeek models compute something else than theirs",
    ),
    Mutant(
        "hf/quantised.py",
        "return read(numbers, where)[::step].contiguous(), read(factors, where)[::step].contiguous()",
        "return read(numbers, where)[:count].contiguous(), read(factors, where)[:count].contiguous()",
        "hf/test_quantised.py::test_a_base_keeps_the_blocks_of_its_folder",
        "blocks of gate and up are taken one after the other",
        "gpt-oss' experts compute with rows that are mixed up",
    ),
    Mutant(
        "hf/compose.py",
        """v |= {"gate.renormalise": v["gate.kind"] != "switch", "gate.kind": "softmax"}""",
        """v |= {"gate.kind": "softmax"}""",
        "hf/test_compose.py::test_gates_of_training_leave_as_what_they_are_outside_of_it",
        "a switch gate leaves as one that renormalises",
        "an exported Switch model gives every expert the weight 1",
    ),
    Mutant(
        "hf/compose.py",
        '    v["gate.capacity_factor"] = beyond if beyond >= 0 else v["gate.capacity_factor"]',
        '    v["gate.capacity_factor"] = 0.0',
        "hf/test_compose.py::test_what_stands_in_the_way_is_told",
        "capacity is forgotten on the way out",
        "transformers computes rows that the run dropped, and logits differ without a word",
    ),
    Mutant(
        "hf/foreign_experts.py",
        "alike = gate_of(given).__qualname__ in CLAMPED and numbers == (SLOPE, LIMIT)",
        "alike = gate_of(given).__qualname__ in CLAMPED",
        "hf/test_foreign_experts.py::test_other_activations_are_told_apart",
        "another slope or limit passes for ours",
        "experts of such a model compute with the numbers of gpt-oss",
    ),
    Mutant(
        "hf/manifest.py",
        "with open_file(path / name, inside=path) as file:",
        "with open_file(path / name) as file:",
        "hf/test_manifest.py::test_what_a_link_leads_to_elsewhere_is_not_read",
        "what a folder's links lead to is opened",
        "a model from elsewhere finds out what stands in any file of this machine",
        survived=True,
    ),
)
