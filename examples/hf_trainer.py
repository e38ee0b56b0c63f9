"""A model of transformers under its own Trainer: our experts, shared out over ranks.

    python examples/hf_trainer.py
    torchrun --standalone --nproc-per-node 2 examples/hf_trainer.py [--save FOLDER]

A tiny Qwen3-MoE, made here without a download, learns to count. Both commands print the same losses: the
batch of two ranks is that of one.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import transformers

import moeclipse
import moeclipse.hf

VOCAB, LENGTH, BATCH = 32, 16, 8


def samples(count: int) -> Any:
    """Numbers that go on from a random first one, in a list, which a Trainer takes for a dataset."""
    firsts = torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [[(first + place) % VOCAB for place in range(LENGTH)] for first in firsts]
    return [{"input_ids": row, "labels": row} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--save", default="")
    args = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        dist.init_process_group("gloo")
    mesh = moeclipse.Mesh.of_world(ep=ranks)

    moeclipse.hf.register()
    transformers.set_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = transformers.AutoConfig.for_model("qwen3_moe", vocab_size=VOCAB, head_dim=8, **shape, **experts)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.set_experts_implementation("moeclipse")
    moeclipse.hf.share_experts(model, mesh, exchange={"schedule": "smart"})
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            max_steps=args.steps,
            learning_rate=1e-2,
            max_grad_norm=1.0,
            per_device_train_batch_size=BATCH // ranks,
            save_strategy="no",
            report_to="none",
            logging_steps=1,
            use_cpu=True,
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=samples(64))
        trainer.add_callback(moeclipse.hf.ExpertCallback())
        trainer.train()
    if args.save:
        moeclipse.hf.save_pretrained(model, args.save)
    if mesh.rank == 0:
        for row in trainer.state.log_history[:-1]:
            print(f"step {row['step']} loss {row['loss']:.4f}")
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
