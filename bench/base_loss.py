"""Loss curves of adapters on bases in few bits, and of peft's on the same folder.

    .venv/bin/python bench/base_loss.py [--steps 200] [--first-steps 200] [--bases bf16 nf4] [--json FILE]
    .venv/bin/python bench/base_loss.py --smoke

A small Qwen3-MoE learns the bytes of this project's own docs (all weights, `--first-steps`), and is written
as a Hugging Face folder in bf16. Then adapters beside q, v and every expert learn on, on samples of the same
text in another order: once for each base, with the same first adapters, samples and optimizer; and with
transformers, peft and torch's AdamW, where these are installed. Told are means of the loss over the last
tenth of the steps, and how far they are from those of the first base.
"""

from __future__ import annotations

import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import _smoke
import torch
import torch.nn.functional as F

from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.hf.read import read_config
from moeclipse.train.checkpoints.checkpoint import Checkpoint, OneRank
from moeclipse.train.config import TrainConfig
from moeclipse.train.ranks import PatientRanks
from moeclipse.train.step.learner import Learner
from moeclipse.train.weights.convert import to_hf
from moeclipse.train.weights.hugging_face import load_folder
from moeclipse.train.weights.lora import save_adapter

DOCS = Path(__file__).parent.parent / "docs"
SHAPE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 512,
}
ADAPTERS = {"lora.rank": 8, "lora.alpha": 16.0, "lora.targets": ("q", "v", "experts")}


def configuration(length: int, batch: int, **values: Any) -> TrainConfig:
    given = {
        "data.files": (str(DOCS / "*.md"),),
        "data.seq_len": length,
        "data.batch_size": batch,
        "gate.balance_loss": 0.0,
        "model.dtype": "float32",
        "optim.lr": 1e-3,
        "optim.schedule": "constant",
        "optim.warmup_steps": 0,
        "optim.weight_decay": 0.0,
    }
    return with_values(TrainConfig(), {**read_config(SHAPE, "bench").values, **given, **values})


def checkpoint_of(learner: Learner, folder: Path) -> Checkpoint:
    learner.hf = {"config": SHAPE, "dtype": "BF16", "dtypes": {}}
    return Checkpoint.open(learner.save(folder, 0), OneRank())


def make_folder(config: TrainConfig, steps: int, root: Path) -> float:
    """A model that knows the text a little; returns its last loss."""
    learner = Learner(config, Mesh.single())
    loss = float("nan")
    for step in range(steps):
        loss = float(learner.step(step)["loss"])
    to_hf(checkpoint_of(learner, root / "first"), root / "model")
    return loss


def begun(config: TrainConfig) -> Learner:
    learner = Learner(config, Mesh.single())
    load_folder(learner, PatientRanks(learner.mesh, 60))
    return learner


def ours(config: TrainConfig, steps: int) -> list[float]:
    learner = begun(config)
    return [float(learner.step(step)["loss"]) for step in range(steps)]


def theirs(config: TrainConfig, steps: int, root: Path) -> list[float]:
    """transformers, peft and torch's AdamW, with the same samples and first adapters."""
    import peft
    import transformers

    batches = begun(config).batches
    model = transformers.AutoModelForCausalLM.from_pretrained(root / "model", dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(model, root / "adapter", is_trainable=True)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optim = config.optim
    adam = torch.optim.AdamW(
        trained, lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps, weight_decay=optim.weight_decay
    )
    losses = []
    for step in range(steps):
        part = batches.microbatch(step, 0, 0, 1)
        logits = model(input_ids=part.inputs, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), part.targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, optim.clip_norm)
        adam.step()
        adam.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def end_of(curve: list[float]) -> float:
    last = curve[-max(len(curve) // 10, 1) :]
    return sum(last) / len(last)


def main() -> int:
    parser = _smoke.BenchParser(
        __doc__, smoke={"steps": 2, "first_steps": 2, "length": 16, "batch": 2, "bases": ["bf16", "nf4"]}
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--first-steps", type=int, default=200)
    parser.add_argument("--length", type=int, default=128, help="tokens of a sample")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--bases", nargs="+", default=["bf16", "nf4"], help="bf16, nf4, mxfp4, fp8")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        sizes = (given.length, given.batch)
        first = make_folder(configuration(*sizes), given.first_steps, root)
        print(f"the base: loss {first:.4f} after {given.first_steps} steps")
        began = {**ADAPTERS, "model.from_hf": str(root / "model"), "run.seed": 1}
        save_adapter(
            checkpoint_of(begun(configuration(*sizes, **began)), root / "adapters"), root / "adapter"
        )
        began["lora.adapter"] = str(root / "adapter")
        curves = {}
        for base in given.bases:
            kept = {"model.base": base, "model.dense_base": base}
            curves[base] = ours(configuration(*sizes, **began, **kept), given.steps)
        if find_spec("peft") and find_spec("transformers"):
            curves["peft"] = theirs(configuration(*sizes, **began), given.steps, root)
    ends = {name: end_of(curve) for name, curve in curves.items()}
    for name, curve in curves.items():
        shown = "  ".join(f"{curve[place]:.4f}" for place in range(0, len(curve), max(len(curve) // 4, 1)))
        more = ends[name] - ends[given.bases[0]]
        print(f"{name:<6} {shown}  ends at {ends[name]:.4f}, {more:+.4f} from {given.bases[0]}")
    found = {name.replace("peft", "peft_bf16"): value for name, value in ends.items()}
    _smoke.write(given.json, {"machine": _smoke.machine(), "first_loss": first, **found, "curves": curves})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
