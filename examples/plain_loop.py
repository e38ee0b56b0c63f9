"""A loop of one's own on one device: a layer, its loss, a mask of padding, and a checkpoint by torch.save.

    python examples/plain_loop.py [--device cuda] [--steps 60]

A small network learns to undo a fixed rotation, each token in a sequence of its own length.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from torch import nn

import moeclipse

D, EXPERTS, BATCH, LENGTH = 32, 8, 16, 24


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, D)
        gate = moeclipse.GateConfig(kind="sigmoid", top_k=2, bias_rate=1e-3, balance_loss=1e-3)
        self.moe = moeclipse.MoE(D, 2 * D, EXPERTS, gate=gate, num_shared_experts=1)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        return self.last(h + self.moe(h, mask=mask))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = Net().to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rotation = torch.linalg.qr(torch.randn(D, D)).Q.to(args.device)
    for step in range(args.steps):
        target = torch.randn(BATCH, LENGTH, D, device=args.device)
        lengths = torch.randint(1, LENGTH + 1, (BATCH, 1), device=args.device)
        mask = torch.arange(LENGTH, device=args.device) < lengths
        loss = (model(target @ rotation, mask) - target)[mask].square().mean()
        (loss + moeclipse.aux_loss(model)).backward()
        moeclipse.sync_gradients(model)  # on one rank: moves the biases that keep loads even
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step in (0, args.steps - 1):
            print(f"step {step} loss {loss.item():.6f}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pt"
        torch.save(model.state_dict(), path)
        again = Net().to(args.device)
        again.load_state_dict(torch.load(path, weights_only=True))
        with torch.no_grad():
            same = torch.equal(again(target @ rotation, mask), model(target @ rotation, mask))
        print(f"loaded again: {same}")


if __name__ == "__main__":
    main()
