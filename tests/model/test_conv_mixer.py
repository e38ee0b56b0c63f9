"""Short convolutions between two factors. Documents: `test_delta_mixers.py`; a cache: `test_decode.py`."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from small_model import MODEL, SETTINGS, positions

from moeclipse.model.conv_mixer import ConvMixer
from moeclipse.testing.compare import difference


def test_by_hand() -> None:
    config = replace(MODEL, mixers=("short_conv",), conv_width=2)
    mixer = ConvMixer(config, SETTINGS)
    x = torch.randn(2 * 3, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    write, read, value = F.linear(x, mixer.inputs.weight).view(2, 3, 3, 16).unbind(2)
    product, weight = write * value, mixer.conv.weight
    before = torch.cat([torch.zeros(2, 1, 16, dtype=torch.float64), product[:, :-1]], 1)
    expected = F.linear(
        (read * (weight[:, 1] * product + weight[:, 0] * before)).flatten(0, 1), mixer.out.weight
    )
    assert difference(mixer(x, positions(config, 3)), expected) < 1e-13
