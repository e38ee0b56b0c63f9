"""What the owner of a shard keeps: weights and both moments, in the form that `optim` asks for.

    form             lies in memory as                                       checkpoints and other ranks get
    plain            one tensor                                              that tensor
    low bits         what the bf16 weights lack of fp32 (`ops/low_bits`)     fp32 weights
    8 bits           codes, and a byte for each block (`ops/eight_bits`)     bf16 moments, which is exact

Idea. Whoever updates takes the forms as they are (`ops/adam`). All others, who save, load, compare and send
state, ask for its values and put values back: no other file knows which form it is.

Some of it may lie in the host's memory (`on_host`): its values are there, too, and `put` writes them where
they were. For its update it visits the device (`train/optim/host_states`).

Hazard. Low bits belong to the weights of the bucket as they are: `values` reads those, and `put` leaves them
alone. Whoever puts weights has the bucket store them, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from moeclipse.ops.eight_bits import M_FRACTION, V_FRACTION, EightBits, decode, encode
from moeclipse.ops.low_bits import LowBits, join_part, split
from moeclipse.ops.precision import WIDE
from moeclipse.ops.rounding import Stretches
from moeclipse.train.checkpoints.shard import Later
from moeclipse.train.optim.buckets import Bucket
from moeclipse.train.optim.optim_config import OptimConfig

STATES = ("weight", "adam_m", "adam_v")


@dataclass(kw_only=True)
class ShardState:
    bucket: Bucket
    weight: torch.Tensor | LowBits
    adam_m: torch.Tensor | EightBits
    adam_v: torch.Tensor | EightBits
    stretches: Stretches | None = None
    """What lies where in the shard, once somebody asked."""
    on_host: tuple[str, ...] = ()
    """Which of STATES lie in the host's memory, at addresses that stay."""
    needs_chance: bool = field(init=False)
    """Whether something is rounded by it: moments in 8 bits, weights without a master."""

    def __post_init__(self) -> None:
        alone = isinstance(self.weight, torch.Tensor) and self.weight.dtype == torch.bfloat16
        self.needs_chance = alone or isinstance(self.adam_m, EightBits)

    @classmethod
    def of(cls, bucket: Bucket, config: OptimConfig) -> ShardState:
        """Of a bucket's weights as they are, with moments of zero."""
        narrow = bucket.params.dtype
        plain, device = bucket.weights(narrow), bucket.params.device
        length = len(plain)
        weight: torch.Tensor | LowBits
        if config.master == "low-bits" and narrow == torch.bfloat16:
            weight = LowBits.zeros(length, device)
        elif config.master == "none" or WIDE[narrow] == narrow:
            # Of weights on the host: where updates find them; `values` knows better.
            weight = plain if bucket.lent is None else bucket.params[bucket.shard]
        else:
            weight = plain.to(device=device, dtype=WIDE[narrow])
        m: torch.Tensor | EightBits
        v: torch.Tensor | EightBits
        if config.state == "8bit" and bucket.block:
            m, v = (EightBits.zeros(length, bucket.block, bits, device) for bits in (M_FRACTION, V_FRACTION))
        else:
            dtype = torch.bfloat16 if config.state == "bf16" else WIDE[narrow]
            m, v = (torch.zeros(length, dtype=dtype, device=device) for _ in range(2))
        return cls(bucket=bucket, weight=weight, adam_m=m, adam_v=v)

    def __len__(self) -> int:
        return len(self.adam_m.codes if isinstance(self.adam_m, EightBits) else self.adam_m)

    def values(self, kind: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Elements [start, stop) of one of STATES: themselves where they are plain, or else a copy."""
        kept = getattr(self, kind)
        stop = len(self) if stop is None else stop
        if self._visits(kind):
            return self.bucket.weights(kept.dtype)[start:stop]
        if isinstance(kept, LowBits):
            rounded = self.bucket.weights(torch.bfloat16)[start:stop].to(kept.low.device)
            return join_part(rounded, kept, start, stop)
        if isinstance(kept, EightBits):
            return decode(kept, start, stop).to(torch.bfloat16)
        part: torch.Tensor = kept[start:stop]
        return part

    def _visits(self, kind: str) -> bool:
        """Weights without other master weights, which lie on the host and are updated elsewhere."""
        if kind != "weight" or self.bucket.lent is None or not isinstance(self.weight, torch.Tensor):
            return False
        return self.weight.untyped_storage().data_ptr() == self.bucket.params.untyped_storage().data_ptr()

    def piece(self, kind: str, start: int, stop: int) -> torch.Tensor | Later:
        """The same for a checkpoint: copies wait in host memory, where there is room for all of them.

        State that lies there already is widened when it is written.
        """
        if kind in self.on_host and not isinstance(getattr(self, kind), torch.Tensor):
            make = partial(self._later, kind, start)
            return Later(length=stop - start, dtype=self.type_of(kind), make=make)
        values = self.values(kind, start, stop)
        return values if isinstance(getattr(self, kind), torch.Tensor) else values.cpu()

    def _later(self, kind: str, begin: int, start: int, stop: int) -> torch.Tensor:
        return self.values(kind, begin + start, begin + stop).cpu()

    def type_of(self, kind: str) -> torch.dtype:
        """Of its values."""
        kept = getattr(self, kind)
        if isinstance(kept, LowBits):
            return torch.float32
        return torch.bfloat16 if isinstance(kept, EightBits) else kept.dtype

    def room(self, kind: str) -> torch.Tensor:
        """Its values, to be overwritten with others of any type and `put`: what is rounded is so once."""
        values = self.values(kind)
        return values.float() if isinstance(getattr(self, kind), EightBits) else values

    def put(self, kind: str, values: torch.Tensor) -> None:
        """All elements anew; there may be more or fewer than there were. 8 bits: rounded to the nearest."""
        kept = getattr(self, kind)
        if self._visits(kind):
            self._put_in_place(self.bucket.weights(kept.dtype), values.cpu())
        elif kind in self.on_host:
            self._put_in_place(kept, values.cpu())
        elif isinstance(kept, LowBits):
            bits = LowBits.zeros(len(values), values.device)
            split(values, torch.empty_like(values, dtype=torch.bfloat16), bits)
            setattr(self, kind, bits)
        elif isinstance(kept, EightBits):
            moment = EightBits.zeros(len(values), kept.block, kept.fraction, values.device)
            encode(values.float(), moment)
            setattr(self, kind, moment)
        else:
            setattr(self, kind, values)

    def _put_in_place(self, kept: torch.Tensor | LowBits | EightBits, values: torch.Tensor) -> None:
        if isinstance(kept, LowBits):
            split(values, torch.empty_like(values, dtype=torch.bfloat16), kept)
        elif isinstance(kept, EightBits):
            encode(values.float(), kept)
        elif kept.data_ptr() != values.data_ptr():
            kept.copy_(values)

    def tensors(self) -> dict[str, torch.Tensor]:
        """All that lies in memory for it; weights only where they are not the bucket's own."""
        return {name: tensor for kind in STATES for name, tensor in self.tensors_of(kind).items()}

    def tensors_of(self, kind: str) -> dict[str, torch.Tensor]:
        """The same of one of STATES, by the names that `rebuilt` takes."""
        kept = getattr(self, kind)
        if isinstance(kept, EightBits):
            return {f"{kind} codes": kept.codes, f"{kind} tops": kept.tops}
        if isinstance(kept, LowBits):
            return {f"{kind} low": kept.low, f"{kind} ties": kept.ties}
        own = kept.untyped_storage().data_ptr() == self.bucket.params.untyped_storage().data_ptr()
        return {} if own and kind == "weight" else {kind: kept}

    def rebuilt(self, tensors: Mapping[str, torch.Tensor], on_host: tuple[str, ...] = ()) -> ShardState:
        """The same in other memory, as far as `tensors` name it."""

        def other(kind: str) -> torch.Tensor | LowBits | EightBits:
            kept = getattr(self, kind)
            if isinstance(kept, EightBits) and f"{kind} codes" in tensors:
                return replace(kept, codes=tensors[f"{kind} codes"], tops=tensors[f"{kind} tops"])
            if isinstance(kept, LowBits) and f"{kind} low" in tensors:
                return LowBits(tensors[f"{kind} low"], tensors[f"{kind} ties"])
            same: torch.Tensor | LowBits | EightBits = tensors.get(kind, kept)
            return same

        return replace(self, on_host=on_host, **{kind: other(kind) for kind in STATES})  # type: ignore[arg-type]
