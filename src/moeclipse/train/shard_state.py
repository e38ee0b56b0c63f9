"""What the owner of a shard keeps: weights and both moments, in the form that `optim` asks for.

    form             lies in memory as                                       checkpoints and other ranks get
    plain            one tensor                                              that tensor
    low bits         what the bf16 weights lack of fp32 (`ops/low_bits`)     fp32 weights

Idea. Whoever updates takes the forms as they are (`ops/adam`). All others, who save, load, compare and send
state, ask for its values and put values back: no other file knows which form it is.

Hazard. Low bits belong to the weights of the bucket as they are: `values` reads those, and `put` leaves them
alone. Whoever puts weights has the bucket store them, too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moeclipse.ops.low_bits import LowBits, join, split
from moeclipse.ops.precision import wide_of
from moeclipse.ops.rounding import Stretches
from moeclipse.train.buckets import Bucket
from moeclipse.train.optim_config import OptimConfig

STATES = ("weight", "adam_m", "adam_v")


@dataclass(kw_only=True)
class ShardState:
    bucket: Bucket
    weight: torch.Tensor | LowBits
    adam_m: torch.Tensor
    adam_v: torch.Tensor
    stretches: Stretches | None = None
    """What lies where in the shard, once somebody asked."""

    @classmethod
    def of(cls, bucket: Bucket, config: OptimConfig) -> ShardState:
        """Of a bucket's weights as they are, with moments of zero."""
        narrow = bucket.params.dtype
        wide = bucket.weights(narrow if config.master == "none" else None)
        length, device = len(wide), bucket.params.device
        low = config.master == "low-bits" and narrow == torch.bfloat16
        weight = LowBits.zeros(length, device) if low else wide
        dtype = torch.bfloat16 if config.state == "bf16" else wide_of(narrow)
        m, v = (torch.zeros(length, dtype=dtype, device=device) for _ in range(2))
        return cls(bucket=bucket, weight=weight, adam_m=m, adam_v=v)

    def __len__(self) -> int:
        return len(self.adam_m)

    def values(self, kind: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Elements [start, stop) of one of STATES: themselves where they are plain, or else a copy."""
        kept = getattr(self, kind)
        stop = len(self) if stop is None else stop
        if isinstance(kept, LowBits):
            return join(self.bucket.weights(torch.bfloat16), kept, start, stop)
        return kept[start:stop]

    def piece(self, kind: str, start: int, stop: int) -> torch.Tensor:
        """The same for a checkpoint: copies wait in host memory, where there is room for all of them."""
        values = self.values(kind, start, stop)
        return values if isinstance(getattr(self, kind), torch.Tensor) else values.cpu()

    def type_of(self, kind: str) -> torch.dtype:
        """Of its values."""
        kept = getattr(self, kind)
        return torch.float32 if isinstance(kept, LowBits) else kept.dtype

    def put(self, kind: str, values: torch.Tensor) -> None:
        """All elements anew; there may be more or fewer than there were."""
        if isinstance(getattr(self, kind), LowBits):
            bits = LowBits.zeros(len(values), values.device)
            split(values, torch.empty_like(values, dtype=torch.bfloat16), bits)
            setattr(self, kind, bits)
        else:
            setattr(self, kind, values)

    def tensors(self) -> dict[str, torch.Tensor]:
        """All that lies in memory for it; weights only where they are not the bucket's own."""
        found = {"adam_m": self.adam_m, "adam_v": self.adam_v}
        if isinstance(self.weight, LowBits):
            return {"weight low": self.weight.low, "weight ties": self.weight.ties, **found}
        own = self.weight.untyped_storage().data_ptr() == self.bucket.params.untyped_storage().data_ptr()
        return found if own else {"weight": self.weight, **found}
