"""A LightningModule under DDP: experts over ranks, all other weights shared, one norm for all gradients.

    torchrun --standalone --nproc-per-node 2 examples/lightning_loop.py

Lightning makes the process group, so the layer is made in `configure_model`, behind it. All ranks print the
same losses.
"""

from __future__ import annotations

import os
from typing import Any

import pytorch_lightning as lightning
import torch
from torch import nn

import moeclipse

D, EXPERTS, TOKENS, STEPS = 32, 8, 256, 20


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)  # dense weights and the task are the same everywhere; experts know their numbers
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, D)
        self.rotation = torch.linalg.qr(torch.randn(D, D)).Q

    def configure_model(self) -> None:
        mesh = moeclipse.Mesh.of_world(ep=self.trainer.world_size)
        self.moe = moeclipse.MoE(D, 2 * D, EXPERTS, mesh=mesh, exchange={"schedule": "smart"})
        moeclipse.exclude_experts(self)  # Lightning wraps the module in DDP afterwards

    def training_step(self, target: torch.Tensor, _: int) -> torch.Tensor:
        h = torch.tanh(self.first(target @ self.rotation))
        loss = (self.last(h + self.moe(h)) - target).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss + moeclipse.aux_loss(self)

    def on_before_optimizer_step(self, _: Any) -> None:
        moeclipse.sync_gradients(self)

    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        moeclipse.clip_grad_norm_(self, 1.0)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Losses(lightning.Callback):
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step in (1, trainer.max_steps):
            loss = float(trainer.callback_metrics["loss"])
            print(f"rank {trainer.global_rank} step {trainer.global_step} loss {loss:.6f}\n", end="")


def main() -> None:
    rank, ranks = (
        int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"))
    )
    drawn = torch.randn(STEPS, TOKENS, D, generator=torch.Generator().manual_seed(1 + rank))
    batches: Any = list(drawn)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp",
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[Losses()],
    )
    trainer.fit(Net(), torch.utils.data.DataLoader(batches, batch_size=None))


if __name__ == "__main__":
    main()
