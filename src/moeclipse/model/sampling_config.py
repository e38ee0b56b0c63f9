"""How tokens are chosen (`model/sampling`) and texts written (`train/generate/text`): keys, without torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How tokens are chosen."""

    temperature: float = 1.0
    """Logits are divided by it; 0: always the most likely token."""
    top_k: int = 0
    """Only so many of the most likely tokens can be chosen; 0: all."""
    top_p: float = 1.0
    """Only the fewest most likely tokens whose probabilities add up to this can be chosen."""
    seed: int = 0

    def problems(self) -> Iterator[str]:
        if not 0 <= self.temperature < float("inf"):
            yield f"temperature ({self.temperature}) must be a number, 0 or more"
        if self.top_k < 0:
            yield f"top_k ({self.top_k}) must not be negative; 0 is all tokens"
        if not 0 < self.top_p <= 1:
            yield f"top_p ({self.top_p}) must be above 0 and at most 1"


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(SamplingConfig):
    """How texts are written."""

    max_tokens: int | Literal["auto"] = "auto"
    """Tokens to write after each prompt; auto: 200, or what the model's context leaves."""
    stop: tuple[str, ...] = ()
    """A text ends before the first of these strings."""
    chat: bool = False
    """Prompts are what a user says, framed by the tokenizer's chat template."""
    context: int = 0
    """Tokens of prompt and text together; 0: as many as the model was trained on."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.max_tokens != "auto" and self.max_tokens < 0:
            yield f'max_tokens ({self.max_tokens}) must not be negative, or "auto"'
        if self.context < 0:
            yield f"context ({self.context}) must not be negative; 0 is what the model was trained on"
        if "" in self.stop:
            yield "stop holds an empty string, with which every text would end at once; leave it out"
