"""Which keys are chosen; over ranks in `test_attention.py`, with a cache in `test_decode.py`."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from small_model import MLA, SETTINGS, positions

from moeclipse.model.indexer import Indexer
from moeclipse.model.latent_attention import LatentAttention
from moeclipse.model.rotary import Positions, Rotary, rotate
from moeclipse.testing.compare import difference

CONFIG = replace(MLA, index_topk=3, index_heads=2, index_dim=6)
X, LATENT = (
    torch.randn(7, width, dtype=torch.float64, generator=torch.Generator().manual_seed(width))
    for width in (16, 7)
)


def test_the_best_of_what_a_token_sees() -> None:
    where, indexer = positions(CONFIG, 7), Indexer(CONFIG, SETTINGS)
    chosen = indexer(X, LATENT, where)
    assert chosen is not None
    keys = F.layer_norm(F.linear(X, indexer.key), (6,), indexer.norm_weight, indexer.norm_bias, 1e-6)
    keys = rotate(keys[None, None], where.table)[0, 0]
    queries = rotate(F.linear(LATENT, indexer.query).view(7, 2, 6).transpose(0, 1)[None], where.table)[0]
    weights = F.linear(X, indexer.weights)
    scores = sum(weights[:, head, None] * F.relu(queries[head] @ keys.t()) for head in range(2))
    for token in range(7):
        best = scores[token, : token + 1].topk(min(3, token + 1)).indices
        seen = chosen[0, token, : token + 1].nonzero().flatten()
        assert sorted(best.tolist()) == seen.tolist()


def test_of_keys_that_all_heads_turn_away_from_the_first_are_chosen() -> None:
    """They all score 0. Otherwise a text read piece by piece would differ from itself: `torch.topk` takes
    others among as many more."""
    indexer = Indexer(CONFIG, SETTINGS)
    indexer.query.zero_()
    for tokens in (4, 7, 40):
        more = torch.randn(tokens, 23, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        for dtype in (torch.float64, torch.float32):
            indexer.to(dtype)
            chosen = indexer(more[:, :16].to(dtype), more[:, 16:].to(dtype), positions(CONFIG, tokens))
            assert chosen is not None
            for token in range(tokens):
                assert chosen[0, token, : token + 1].nonzero().flatten().tolist() == [0, 1, 2][: token + 1]
        indexer.to(torch.float64)


def test_nothing_is_chosen_among_few_and_nothing_is_trained() -> None:
    indexer = Indexer(CONFIG, SETTINGS)
    assert indexer(X[:3], LATENT[:3], positions(CONFIG, 3)) is None
    assert not list(indexer.parameters())
    sparse, dense = LatentAttention(CONFIG, SETTINGS), LatentAttention(MLA, SETTINGS)
    assert difference(sparse(X[:3], positions(MLA, 3)), dense(X[:3], positions(MLA, 3))) < 1e-14
    assert difference(sparse(X, positions(MLA, 7)), dense(X, positions(MLA, 7))) > 1e-3


def test_documents_choose_for_themselves() -> None:
    attention = LatentAttention(CONFIG, SETTINGS)
    documents = torch.tensor([[5, 5, 9, 9, 9, 9, 9]])
    packed = attention(X, Positions.of(Rotary.of(CONFIG), 7, X.device, documents_BS=documents))
    apart = torch.cat([attention(X[:2], positions(MLA, 2)), attention(X[2:], positions(MLA, 5))])
    assert difference(packed, apart) < 1e-13
