"""What a training step must compute and move, counted from a configuration: the ground on which speed stands.

    flops       of each weight that a token meets in a product 2 forward, 2 for the gradient of its input and
                2 for its own, which frozen weights have not; router and adapters included, embedding not;
                and attention, 6 H (d_qk + d_v) for each key that a token sees, in layers with attention;
                a state of a delta mixer is read, corrected and read again: 18 for each of its numbers
    bytes       an update reads and writes optimizer state and weights of what is trained, and reads gradients

Layers below the lowest one that has a trained weight have no backward: 2 of each, and a third of attention.
(On several ranks they do: `Transformer.embed`.)

Model FLOPs utilisation (MFU) is flops over time over the device's peak: recomputation does not count, nor do
keys behind a token. The *limit* is the time of the products at the rate that products
reach, and of the update at the memory's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from moeclipse.comm.mesh import Mesh
from moeclipse.cost.hardware import DEVICES, Device
from moeclipse.cost.layer_seconds import UPDATE_BYTES
from moeclipse.model.config import ModelConfig
from moeclipse.model.count import state_values
from moeclipse.model.lora_config import NO_LORA, LoraConfig
from moeclipse.model.transformer import Transformer
from moeclipse.moe.config import GateConfig, MoEConfig


@dataclass(frozen=True, kw_only=True)
class LeastWork:
    """Of one step of all ranks."""

    flops: float
    update_bytes: float

    @classmethod
    def of(
        cls,
        model: ModelConfig,
        moe: MoEConfig,
        gate: GateConfig,
        *,
        tokens: int,
        seq_len: int,
        lora: LoraConfig = NO_LORA,
        is_frozen: Callable[[str], bool] = lambda _: False,
        bytes_each: float = UPDATE_BYTES,
    ) -> LeastWork:
        """`is_frozen`: by a parameter's name; `bytes_each`: that an update moves of a parameter."""
        nowhere = Mesh.single(torch.device("meta"))
        numbers = replace(model, base="", dense_base="")  # products are with these, however they are kept
        whole = Transformer(numbers, moe, gate, mesh=nowhere, lora=lora)
        weights = trained = updated = 0.0
        first = lowest([name for name, _ in whole.named_parameters() if not is_frozen(name)])
        for name, parameter in whole.named_parameters():
            met = weights_met(name, parameter, gate.expected_experts, tied=model.tie_embeddings)
            weights += met / 2 if 0 <= layer_of(name) < first else met
            if not is_frozen(name):
                trained, updated = trained + met, updated + parameter.numel()
        share = [1 if layer >= first else 1 / 3 for layer in range(model.num_layers)]
        keys = sum(
            keys_of(model, layer, seq_len) * share[layer]
            for layer in range(model.num_layers)
            if model.mixer_of(layer) == "attention"
        )
        states = sum(state_values(model, layer) * part for layer, part in enumerate(share))
        mla = model.attention == "mla"
        qk = model.qk_nope_head_dim + model.qk_rope_head_dim if mla else model.head_dim
        v = model.v_head_dim if mla else model.head_dim
        attention = 6 * model.num_heads * (qk + v) * keys
        flops = tokens * (4 * weights + 2 * trained + attention + 18 * states)
        return cls(flops=flops, update_bytes=bytes_each * updated)

    def limit_s(self, device: Device, num_ranks: int) -> float:
        """Seconds in which nothing but products and the update is done."""
        products = self.flops / (device.flops * device.efficiency)
        return (products + self.update_bytes / device.memory_bandwidth) / num_ranks

    def speed(self, step_s: float, device: Device, num_ranks: int) -> dict[str, float]:
        return {
            "mfu": self.flops / (step_s * device.flops * num_ranks),
            "of_limit": self.limit_s(device, num_ranks) / step_s,
        }


def layer_of(name: str) -> float:
    """That a parameter belongs to; the embedding comes before all layers, norm and head behind them."""
    if name.startswith("embedding"):
        return -1
    return int(name.split(".")[1]) if name.startswith("layers.") else math.inf


def lowest(trained: Sequence[str]) -> float:
    """The first layer that has a backward."""
    return max(min(map(layer_of, trained), default=math.inf), 0)


def weights_met(name: str, parameter: torch.Tensor, experts: float, *, tied: bool) -> float:
    """Of this parameter, that one token is multiplied with; `experts` are those it visits of a layer."""
    if parameter.dim() < 2 or name.endswith("_bias") or (name == "embedding" and not tied):
        return 0.0
    visited = experts / len(parameter) if ".moe.experts." in name else 1.0
    return visited * parameter.numel()


def keys_of(model: ModelConfig, layer: int, seq_len: int) -> float:
    """On average, that a token of this layer sees."""
    if chunk := min(model.chunk_of(layer), seq_len):
        whole, rest = divmod(seq_len, chunk)
        return (whole * chunk * keys_seen(chunk, 0, 0) + rest * keys_seen(max(rest, 1), 0, 0)) / seq_len
    return keys_seen(seq_len, model.window_of(layer), model.memory)


def keys_seen(seq_len: int, window: int, memory: int) -> float:
    """On average over the tokens of a sequence, each of which sees itself and what stands before it."""
    most = min(window or seq_len, seq_len)
    return most * (most + 1) / 2 / seq_len + (seq_len - most) * most / seq_len + memory


def device_of(cuda_name: str) -> Device | None:
    """ "NVIDIA H200" -> that of the table, if it is known."""
    words = cuda_name.lower().split()
    return next((device for name, device in DEVICES.items() if name in words), None)
