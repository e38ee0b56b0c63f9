"""Some lines that a model writes at the end of its training: what all the numbers before them mean.

Each line goes on from a few tokens of the corpus. It is bounded in tokens and in time, and written by the
model as it lies on the ranks: all of them take part (`train/generate/text`). Where that cannot be, one line
says why.
"""

from __future__ import annotations

import time
from pathlib import Path

from moeclipse.core.errors import ConfigError, DataError
from moeclipse.train.generate.text import GenerateConfig, LanguageModel
from moeclipse.train.step.learner import Learner
from moeclipse.train.weights.open_model import of_configuration

PROMPT_TOKENS, WRITTEN_TOKENS = 16, 48
MAX_SECONDS = 5.0
WARMTH = 0.7
"""Below 1: a model that has hardly learned is shown by what it is surest of."""


def write_sample(learner: Learner, lines: int) -> dict[str, object]:
    """{"lines": [[prompt, text], ...]}, or {"why": why there are none}; JSON-able. Collective."""
    config = learner.config
    if learner.mesh.pp > 1:
        return {"why": "its layers lie on several ranks (parallel.pp); moeclipse generate writes with it"}
    prompt_tokens = min(PROMPT_TOKENS, config.data.seq_len // 2)
    written = min(WRITTEN_TOKENS, config.data.seq_len - prompt_tokens)
    if prompt_tokens < 1 or written < 1:
        return {"why": f"data.seq_len ({config.data.seq_len}) leaves no room for a prompt and a text"}
    try:
        found = of_configuration(config, Path(config.run.dir) / config.run.name)
        vocabulary = found.vocabulary()
    except (ConfigError, DataError) as error:
        return {"why": str(error)}
    model = LanguageModel(learner.model, vocabulary, segment=found.segment, ends=found.ends)
    prompts = [beginning(learner, number, prompt_tokens) for number in range(lines)]
    options = GenerateConfig(max_tokens=written, temperature=WARMTH, seed=config.run.seed)
    texts = [""] * lines
    for piece in model.stream_tokens(prompts, options, time.monotonic() + MAX_SECONDS):
        texts[piece.row] += piece.text
    heads = [vocabulary.decode(prompt) for prompt in prompts]
    return {"lines": [[head, text] for head, text in zip(heads, texts, strict=True)]}


def beginning(learner: Learner, number: int, num_tokens: int) -> list[int]:
    """The first tokens of a sample behind the last that was trained on, the same in every layout."""
    samples = learner.batches.microbatch(learner.config.run.steps, 0, 0, 1).inputs
    return [int(token) for token in samples[number % len(samples)][:num_tokens]]
