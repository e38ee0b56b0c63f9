"""A digest knows every bit: any single flip gives another number, and equal bits the same one."""

from __future__ import annotations

import pytest
import torch

from moeclipse.ops import digest as digests
from moeclipse.ops.digest import digest, digest_rows

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_flip_of_a_bit_is_seen(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "CHUNK", 3)  # several chunks, the last of them short
    values = torch.arange(7).to(dtype)
    before = int(digest(values))
    assert int(digest(values.clone())) == before
    bytes_ = values.view(torch.uint8)
    for place in range(bytes_.numel()):
        for bit in range(1 if dtype == torch.bool else 8):
            bytes_[place] ^= 1 << bit
            assert int(digest(values)) != before, (place, bit)
            bytes_[place] ^= 1 << bit
    assert int(digest(values)) == before, "and values are left as they are"


def test_order_and_sign_count() -> None:
    values = torch.randn(100)
    assert int(digest(values)) != int(digest(values.flip(0)))
    assert int(digest(torch.tensor([0.0]))) != int(digest(torch.tensor([-0.0])))
    assert int(digest(torch.tensor([torch.nan]))) == int(digest(torch.tensor([torch.nan])))


def test_rows_are_digested_alike_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randn(5, 11)
    expected = [int(digest(row)) for row in rows]
    assert digest_rows(rows).tolist() == expected
    monkeypatch.setattr(digests, "CHUNK", 22)
    assert digest_rows(rows).tolist() == expected, "two rows at a time"
    assert digest_rows(rows[:0]).tolist() == []
    assert int(digest(rows[:0])) == 0
    assert int(digest(torch.tensor(3.0))) == int(digest(torch.tensor([3.0])))


@pytest.mark.parametrize("shape", [(1, 50), (3, 12), (2, 7), (4, 3), (1, 1)])
def test_by_the_definition(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "CHUNK", 4)
    rows = torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32)
    expected = []
    for row in rows.tolist():
        total = 0
        for place, value in enumerate(row):
            odd = ((place % 4 + 1) * digests.MIXER) | 1
            total += value * odd * (place // 4 * digests.MIXER % 2**62 * 2 + 1)
        expected.append((total + 2**63) % 2**64 - 2**63)
    assert digest_rows(rows).tolist() == expected
