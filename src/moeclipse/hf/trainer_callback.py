"""What a transformers Trainer has to know of experts that are shared out over ranks.

    trainer = Trainer(model=model, args=args, callbacks=[moeclipse.hf.ExpertCallback()])

Trainer wraps the model in DDP, which leaves experts alone (`hf/share`), clips by the norm that one
rank sees, and lets rank 0 save what rank 0 has. So before each step this callback finishes the gradients of
experts and clips by the norm of all ranks, and it saves whole models by itself.

Hazard: `args.max_grad_norm` is taken over (Trainer would clip before the gradients are whole), and
`args.save_strategy` must be "no".
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from moeclipse.core.errors import ConfigError
from moeclipse.hf.share import save_pretrained
from moeclipse.moe.own_loop.clip import clip_grad_norm_
from moeclipse.moe.own_loop.standalone import sync_gradients


class ExpertCallback(TrainerCallback):
    def __init__(self, *, save_every: int = 0) -> None:
        """`save_every`: steps between whole models in `args.output_dir`/checkpoint-STEP; 0: none."""
        self.save_every, self.max_norm = save_every, 0.0

    def on_train_begin(self, args: Any, *_: Any, **__: Any) -> None:
        if str(args.save_strategy).rpartition(".")[2].lower() != "no":
            raise ConfigError(
                f"save_strategy ({args.save_strategy!r}) would write the experts of rank 0 alone; set "
                'save_strategy="no" and give ExpertCallback(save_every=STEPS)'
            )
        self.max_norm, args.max_grad_norm = args.max_grad_norm or self.max_norm, 0.0

    def on_pre_optimizer_step(self, *_: Any, **given: Any) -> None:
        sync_gradients(given["model"])
        if self.max_norm > 0:
            clip_grad_norm_(given["model"], self.max_norm)

    def on_step_end(self, args: Any, state: Any, *_: Any, **given: Any) -> None:
        if self.save_every and state.global_step % self.save_every == 0:
            save_pretrained(given["model"], Path(args.output_dir) / f"checkpoint-{state.global_step}")

    def on_train_end(self, args: Any, *_: Any, **__: Any) -> None:
        args.max_grad_norm = self.max_norm
