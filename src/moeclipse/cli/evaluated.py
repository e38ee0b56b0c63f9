"""Loss on text that is held out, in words for a terminal: while a run goes, and in its summary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.text import Text


def eval_text(told: Mapping[str, Any]) -> str:
    """Loss and perplexity on text that is held out; of each source where there are several."""
    text = f"held out: loss {told['eval_loss']:.4f}, perplexity {told['eval_perplexity']:.4g}"
    parts = told.get("eval_sources") or {}
    each = ", ".join(f"{name} {part['eval_perplexity']:.4g}" for name, part in parts.items())
    return f"{text} ({each})" if each else text


def eval_lines(summary: Mapping[str, Any]) -> list[tuple[str, list[Text]]]:
    if summary.get("eval_loss") is None:
        return []
    lines = [Text(eval_text(summary))]
    if "best_step" in summary:
        best = f"best: loss {summary['best_eval_loss']:.4f} after step {summary['best_step']}"
        lines.append(Text(f"{best}, which is kept"))
    return [("eval", lines)]
