"""What a training step must compute and move, counted from a configuration: the ground on which speed stands.

    flops       6 for each weight that a token meets in a product (2 forward, 4 backward), router included and
                embedding not; and attention, 6 L H (d_qk + d_v) S a token, of which a causal one needs half
    bytes       an update reads and writes optimizer state, master and rounded weights, and reads gradients

Model FLOPs utilisation (MFU) is flops over time over the device's peak: recomputation does not count. The
*limit* is the time of the products at the rate that products reach, and of the update at the memory's.
"""

from __future__ import annotations

from dataclasses import dataclass

from moeclipse.cost.hardware import DEVICES, Device
from moeclipse.model.config import ModelConfig
from moeclipse.model.count import count_parameters
from moeclipse.moe.config import GateConfig, MoEConfig

UPDATE_BYTES = 34
"""Of a parameter: fp32 weight and moments read and written (24), its gradient read for the norm and for the
update (8), the bf16 weight written (2)."""


@dataclass(frozen=True, kw_only=True)
class LeastWork:
    """Of one step of all ranks."""

    flops: float
    update_bytes: float

    @classmethod
    def of(
        cls, model: ModelConfig, moe: MoEConfig, gate: GateConfig, *, tokens: int, seq_len: int
    ) -> LeastWork:
        everything, active = count_parameters(model, moe, gate)
        looked_up = 0 if model.tie_embeddings else model.vocab_size * model.d_model
        norms = (model.num_layers * (4 if model.norms == "both" else 2) + 1) * model.d_model
        mla = model.attention == "mla"
        qk = model.qk_nope_head_dim + model.qk_rope_head_dim if mla else model.head_dim
        v = model.v_head_dim if mla else model.head_dim
        attention = 6 * model.num_layers * model.num_heads * (qk + v) * seq_len
        flops = tokens * (6 * (active - looked_up - norms) + attention)
        return cls(flops=flops, update_bytes=UPDATE_BYTES * everything)

    def limit_s(self, device: Device, num_ranks: int) -> float:
        """Seconds in which nothing but products and the update is done."""
        products = self.flops / (device.flops * device.efficiency)
        return (products + self.update_bytes / device.memory_bandwidth) / num_ranks

    def speed(self, step_s: float, device: Device, num_ranks: int) -> dict[str, float]:
        return {
            "mfu": self.flops / (step_s * device.flops * num_ranks),
            "of_limit": self.limit_s(device, num_ranks) / step_s,
        }


def device_of(cuda_name: str) -> Device | None:
    """ "NVIDIA H200" -> that of the table, if it is known."""
    words = cuda_name.lower().split()
    return next((device for name, device in DEVICES.items() if name in words), None)
