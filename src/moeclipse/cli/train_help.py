"""What `moeclipse train --help` says: the settings that most runs need, with the values they have now.

`--help-all` says the same of every setting, from the dataclasses that the flags are read by.
"""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

from moeclipse.cli.words import WIDTH, columns, lowered, placeholder
from moeclipse.core.config import flag_of, hints_of, to_flat
from moeclipse.core.toml import docs_of, toml_value
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


def full_help(*parts: object) -> str:
    """Every setting of these dataclasses, section by section, with its description and its value."""
    lines = [*HEAD.splitlines(), ""]
    for part in parts:
        lines += _section(part, "")
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _section(config: Any, prefix: str) -> Iterator[str]:
    hints, docs = hints_of(type(config)), docs_of(type(config))
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    inside = {name: value for name, value in values.items() if dataclasses.is_dataclass(value)}
    rows = [
        (
            f"{flag_of(prefix + name)} {placeholder(hints[name])}",
            docs.get(name, ""),
            f" ({toml_value(value)})",
        )
        for name, value in values.items()
        if name not in inside
    ]
    if rows:
        section, about = prefix.removesuffix("."), (inspect.getdoc(type(config)) or "").partition("\n\n")[0]
        written = not about.startswith(f"{type(config).__name__}(")  # else `dataclass` wrote it
        title = f"{section}: {lowered(about)}" if section and written else section or about
        yield from (*textwrap.wrap(title, WIDTH), *columns(rows), "")
    for name, value in inside.items():
        yield from _section(value, f"{prefix}{name}.")
