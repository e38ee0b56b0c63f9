"""Logits of texts that grow: each token is read once (`model/cache`).

    with writing(model):
        decoder = Decoder(model, rows=2, length=64)
        logits_BV = decoder.read([[5, 2, 9], [7]])      # of the last token of each row
        logits_BV = decoder.read([[1], [3]])            # one more token each

Idea. Everything in the model but attention looks at one token at a time. So a call reads a block of tokens,
one row for each text, padded behind the ends of the shorter ones, and keeps keys and values.

Contract. Logits of a token are those of a forward over its row up to it, with every gate choosing freely:
room for rows (`gate.capacity_factor`, `gate.max_leaving`) depends on who else is in the batch, and with it a
text would depend on its neighbours, so `writing` lifts such bounds while it lasts. Weights, buffers and the
mode of the model are as before afterwards.

Under the "dynamic" rotary scaling all angles change with every token beyond `rope_original_len`, and with
them what each layer made of the tokens before: such texts are read again from their beginning.

On several ranks each rank of `mesh.data` reads rows of its own, as many as it likes, none included; all of
them call equally often. Ranks of a tp group read the same rows; every one of them gets the logits of the
whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from moeclipse.core.errors import ConfigError
from moeclipse.core.shares import even_bounds
from moeclipse.model.cache import CacheCall, KeyValueCache
from moeclipse.model.rotary import Positions, Rotary, near_rotary
from moeclipse.model.transformer import Transformer
from moeclipse.moe.config import GateConfig
from moeclipse.moe.gate.gates import Gate
from moeclipse.moe.tokens import Tokens
from moeclipse.tensor.parallel import move


@contextmanager
def writing(model: Transformer) -> Iterator[None]:
    """No gradients, no noise, no bound on the rows of an expert."""
    gates = [module for module in model.modules() if isinstance(module, Gate)]
    before, training = [gate.config for gate in gates], model.training
    try:
        model.eval()
        for gate in gates:
            gate.config = unbounded(gate.config)
        with torch.no_grad():
            yield
    finally:
        model.train(training)
        for gate, config in zip(gates, before, strict=True):
            gate.config = config


def unbounded(gate: GateConfig) -> GateConfig:
    """A token's experts depend on the token alone."""
    room: dict[str, Any] = {"capacity_factor": 0.0, "eval_capacity_factor": -1.0, "min_capacity": 0}
    return replace(gate, **room, max_leaving=1.0, renormalise_kept=False, overflow=GateConfig().overflow)


class Decoder:
    """Rows of text, and what the model has read of them."""

    def __init__(self, model: Transformer, rows: int, length: int, *, segment: int = 0) -> None:
        """`length`: tokens of the longest row. `segment`: of a model with memory, what it was trained on."""
        if not (model.begins and model.ends):
            raise ConfigError("this rank holds some layers of a pipeline; a text needs all of them")
        if model.config.memory and segment < 1:
            raise ConfigError("a model with memory reads segments; give the length of one")
        unit = model.tp.size if model.tp.parts_tokens else 1
        if rows % unit:
            raise ConfigError(f"rows ({rows}) must be a multiple of tp ({unit}) with sequence parallelism")
        self.model, self.rows, self.length, self.segment = model, rows, length, segment
        self.rotary, self.near = Rotary.of(model.config), near_rotary(model.config)
        self.cache = KeyValueCache(length + 1)  # the last place takes padding, and is never seen
        self.texts: list[list[int]] = [[] for _ in range(rows)]
        """What was read."""

    def begin(self) -> None:
        """Other texts, from their first tokens on, in the same memory."""
        self.texts = [[] for _ in range(self.rows)]
        self.cache.clear()

    def read(self, new: Sequence[Sequence[int]]) -> torch.Tensor:
        """Logits of the last token of each row, [B, V], after these tokens.

        The logits of a row without new tokens mean nothing.
        """
        first_B = self.grow(new)
        longest = max(map(len, self.texts), default=0)
        if self.rotary.scaling == "dynamic" and longest > self.rotary.original_len:
            new, first_B, self.cache = self.texts, [0] * self.rows, KeyValueCache(self.length + 1)
        width = max([1, *map(len, new)])
        ids_BS = torch.zeros(self.rows, width, dtype=torch.int64)
        for ids_S, row in zip(ids_BS, new, strict=True):
            ids_S[: len(row)] = torch.tensor(row, dtype=torch.int64)
        device, begins = self.model.mesh.device, not any(first_B)
        num_keys = width if begins else min(max(first_B) + width, self.length)
        places = torch.tensor(first_B, dtype=torch.int64, device=device)
        counts = torch.tensor(list(map(len, new)), dtype=torch.int64, device=device)
        h_TD = self.forward(ids_BS.to(device), places, counts, num_keys, begins=begins)
        last_B = torch.tensor([max(len(row), 1) - 1 for row in new], dtype=torch.int64)
        return self.logits(h_TD, (torch.arange(self.rows) * width + last_B).to(device))

    def grow(self, new: Sequence[Sequence[int]]) -> list[int]:
        """Where the new tokens of each row begin, which is longer by them now."""
        if len(new) != self.rows:
            raise ConfigError(f"tokens for {len(new)} rows, but the decoder has {self.rows}")
        grown = [[*text, *row] for text, row in zip(self.texts, new, strict=True)]
        longest = max(map(len, grown), default=0)
        if longest > self.length:
            raise ConfigError(f"a row of {longest} tokens is longer than the decoder's {self.length}")
        first_B, self.texts = list(map(len, self.texts)), grown
        return first_B

    def forward(
        self,
        ids_BS: torch.Tensor,
        first_B: torch.Tensor,
        count_B: torch.Tensor,
        num_keys: int,
        *,
        begins: bool = False,
    ) -> torch.Tensor:
        """Behind the last layer, for tokens at the places first_B + 0, 1, ... of their rows."""
        model, (rows, width) = self.model, ids_BS.shape
        place_BS = first_B[:, None] + torch.arange(width, device=ids_BS.device)
        place_BS = place_BS.clamp(max=self.length)
        call = CacheCall(
            cache=self.cache,
            place_BS=place_BS,
            num_keys=num_keys,
            begins=begins,
            count_B=count_B,
            segment=self.segment,
        )
        positions = Positions(table=self._table(place_BS), length=width, place=place_BS, cache=call)
        if self.near is not None:
            table = self.near.table(place_BS[:, None], self.length)
            positions = replace(positions, near=replace(positions, table=table))
        # Gates that choose freely do not ask where a token lies.
        tokens = Tokens(mesh=model.mesh, first=0, total=max(rows * width, 1), group=model.mesh.data)
        h_TD = model.embed(ids_BS)
        for layer in model.layers.values():
            h_TD, _ = layer(h_TD, positions, tokens)
        return h_TD

    def _table(self, place_BS: torch.Tensor) -> torch.Tensor:
        """cos and sin, [2, B, 1, S, P]; where a text's length changes angles, by that of each row."""
        if self.rotary.scaling != "dynamic" or not len(place_BS):
            return self.rotary.table(place_BS[:, None], self.length)
        rows = zip(place_BS, self.texts, strict=True)
        return torch.stack([self.rotary.table(row[None], len(text)) for row, text in rows], dim=1)

    def logits(self, h_TD: torch.Tensor, place_N: torch.Tensor) -> torch.Tensor:
        """Of some tokens, for the whole vocabulary: [N, V]."""
        model, tp = self.model, self.model.tp
        if tp.parts_tokens:
            h_TD = tp.gather_rows(h_TD, "hidden states of a text").get()
        h_ND = h_TD[place_N]
        if tp.parts_tokens:
            h_ND = move(h_ND, tp, "slice", "gather", "last tokens")
        logits_NV = model.logits(h_ND)
        if tp.size == 1:
            return logits_NV
        bounds = even_bounds(model.config.vocab_size, tp.size)
        widths = [stop - start for start, stop in pairwise(bounds)]
        padded = torch.nn.functional.pad(logits_NV, (0, max(widths) - logits_NV.shape[1]))
        parts_PNV = tp.comm.gather(padded.contiguous(), "logits of a text").get()
        return torch.cat([part[:, :w] for part, w in zip(parts_PNV, widths, strict=True)], dim=1)
