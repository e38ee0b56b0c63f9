"""What `moeclipse train --help` says first: the settings that most runs need, with the values they have now.

Every other setting is behind `--help-all`, and in the file that `--print-config` prints.
"""

from __future__ import annotations

from moeclipse.core.config import to_flat
from moeclipse.train.config import TrainConfig
from moeclipse.train.presets import preset_names

HEAD = """usage: moeclipse train [config.toml] [--section.key value ...]
Train a Mixture-of-Experts language model. Flags win over the file, the file over the preset.
"""
MOST_WANTED = (
    ("--ranks N", "", "processes to start here; 2:4: at least 2 when some are lost"),
    ("--resume auto", "", "go on with the run from its newest whole checkpoint"),
    ("--run.name NAME", "run.name", "folder below runs/; empty: preset and time"),
    ("--run.steps N", "run.steps", "how long"),
    ("--data.files GLOB ...", "data.files", "what to learn; empty: Python's own sources"),
    ("--data.tokenizer FILE", "data.tokenizer", "a tokenizer.json; empty: bytes"),
    ("--data.batch-size N", "data.batch_size", "samples per step, over all ranks"),
    ("--data.seq-len N", "data.seq_len", "tokens of a sample"),
    ("--model.num-layers N", "model.num_layers", "how deep; --model.d-model is how wide"),
    ("--model.from-hf DIR", "model.from_hf", "begin from a Hugging Face model, with its shape"),
    ("--moe.num-experts N", "moe.num_experts", "experts of a layer; --gate.top-k of them for each token"),
    ("--optim.lr X", "optim.lr", "learning rate, at its highest"),
    ("--parallel.tp N", "parallel.tp", "ranks that share each matrix; --parallel.pp: the layers"),
)
"""(flag, the key whose value is shown, in words)."""
TAIL = "All settings with their descriptions: --help-all, or as a file to begin from: --print-config\n"


def short_help(config: TrainConfig, preset: str) -> str:
    """Twenty lines."""
    flat = to_flat(config)
    rows = [("--preset NAME", preset or "none", f"tiny, small, 5b, ...: {len(preset_names())} to begin from")]
    for flag, key, words in MOST_WANTED:
        value = flat[key] if key else ""
        if isinstance(value, list | tuple):
            value = " ".join(map(str, value))
        rows.append((flag, str(value), words))
    rows = [(flag, value if len(value) <= 12 else f"{value[:9]}...", words) for flag, value, words in rows]
    lines = [f"  {flag:<22} {value:<12}  {words}" for flag, value, words in rows]
    return "\n".join([HEAD, *lines, "", TAIL])
