"""Every command of docs/recipes.md runs as it stands there, at a tiny size, and leaves what the page says."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import torch
from tiny_models import load, peft, write_tiny

from moeclipse.cli.main import main
from moeclipse.comm.mesh import Mesh
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_alone

PRETRAIN = "Pretrain on jsonl with validation"
CHAT = "Fine-tune on conversations, and ask"
ADAPTER = "Train an adapter on conversations, and merge it"
FEW_BITS = "Train an adapter on a base of four bits"
EXPORT = "Go on from an export with another corpus"
PAGE = (Path(__file__).parent.parent / "docs" / "recipes.md").read_text()
TRAINING = (
    *("--ranks", "1", "--run.steps", "3", "--data.seq-len", "64", "--data.batch-size", "1"),
    *("--run.device", "cpu", "--metrics.warmup-steps", "1"),
)
SHAPE = (
    *(
        "--model.num-layers",
        "2",
        "--model.d-model",
        "16",
        "--model.num-heads",
        "2",
        "--model.num-kv-heads",
        "1",
    ),
    *("--model.head-dim", "8", "--moe.num-experts", "4", "--moe.d-ff", "8", "--gate.top-k", "2"),
)


def sections() -> dict[str, list[list[str]]]:
    """Title -> its commands, as words."""
    found = {}
    for part in PAGE.split("\n## ")[1:]:
        title, _, text = part.partition("\n")
        lines = re.findall(r"^    (moeclipse .*)$", text, re.MULTILINE)
        found[title] = [shlex.split(line) for line in lines]
    return found


def smaller(words: list[str]) -> list[str]:
    """The same command for a model that is trained in a second."""
    if words[0] == "convert":
        return words
    if words[0] == "generate":
        return [*words, "--max-tokens", "3"] if "--max-tokens" not in words else words
    own = () if any("--model.from-hf" in word for word in words) else SHAPE
    return [*words, *TRAINING, *own]


def follow(mesh: Mesh, commands: list[list[str]], folder: Path) -> list[tuple[int, str]]:
    os.chdir(folder)
    results = []
    for _, *words in commands:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            code = main(smaller(words))
        results.append((code, out.getvalue()))
    return results


def corpus(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).mkdir()
        for number in range(2):
            (folder / name / f"{number}.txt").write_text(f"The {name} text says a thing. " * 20)


def tokenizer(path: Path) -> None:
    """Characters as tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = {char: number for number, char in enumerate(" Thefirstcondaxgymwb.?ul")}
    made = Tokenizer(models.WordLevel(letters, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.Fuse()
    made.save(str(path))


def recipe(title: str, folder: Path) -> list[str]:
    results: Any = run_alone(follow, sections()[title], folder)
    assert results, "the page shows no command"
    assert [code for code, _ in results] == [0] * len(results), results
    return [out for _, out in results]


def test_pretrain_on_jsonl(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    for number in range(2):
        records = [{"text": f"The text {place} says a thing. " * 3} for place in range(40)]
        lines = "\n".join(map(json.dumps, records))
        (tmp_path / "corpus" / f"{number}.jsonl").write_text(lines)
    trained, text = recipe(PRETRAIN, tmp_path)
    assert "it writes" in trained
    assert "held out: loss" in trained
    assert text.startswith("The ")


TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}: {{ m.content }}."
    "{% endfor %}{% if add_generation_prompt %}a: {% endif %}"
)


def conversations(folder: Path, **sizes: int) -> None:
    """A model with a template, and what is said."""
    write_tiny("mixtral", folder / "model", **sizes)
    tokenizer(folder / "model" / "tokenizer.json")
    settings = {"chat_template": TEMPLATE, "eos_token": "."}
    (folder / "model" / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat").mkdir()
    turns = [{"role": "user", "content": "Is it so"}, {"role": "assistant", "content": "The text is"}]
    (folder / "chat" / "a.jsonl").write_text("\n".join([json.dumps({"messages": turns})] * 60))


def test_fine_tune_on_conversations(tmp_path: Path) -> None:
    conversations(tmp_path)
    _, text = recipe(CHAT, tmp_path)
    assert text.startswith("Is it so?")


def logits(_: Mesh, folder: Path) -> list[torch.Tensor]:
    """Of the base, of base and adapter, and of the merged model, as transformers and peft load them."""
    ids = torch.randint(0, 23, (2, 8), generator=torch.Generator().manual_seed(2))
    base, merged = (load(folder / name, torch.float32) for name in ("model", "merged"))
    with torch.no_grad():
        plain, whole = (model(input_ids=ids, use_cache=False).logits for model in (base, merged))
        adapted = peft.PeftModel.from_pretrained(base, folder / "adapter")
        return [plain, adapted(input_ids=ids, use_cache=False).logits, whole]


def test_train_an_adapter_and_merge_it(tmp_path: Path) -> None:
    conversations(tmp_path)
    _, first, _, _, second = recipe(ADAPTER, tmp_path)
    assert first.startswith("Is it so?")
    assert second == first, "merged, it writes something else"
    base, adapted, merged = run_alone(logits, tmp_path)
    assert difference(merged, adapted) <= 1e-5
    assert difference(merged, base) > 1e-4


def test_train_an_adapter_on_a_base_of_four_bits(tmp_path: Path) -> None:
    conversations(tmp_path, hidden_size=32, intermediate_size=32)
    trained, first, _, second, _, third = recipe(FEW_BITS, tmp_path)
    assert re.search(r"experts' up +8 +nf4 +8 adapted", trained)
    assert re.search(r"attention +8 +nf4 +4 adapted", trained)
    assert first.startswith("Is it so?")
    # The run knows that a turn ends with a full stop; the folder of the model does not say so.
    assert second.split(".")[0].strip() == first.strip(), "beside the same base it writes something else"
    assert third.split(".")[0].strip() == first.strip(), "merged, it writes something else"
    base, adapted, merged = run_alone(logits, tmp_path)
    assert difference(merged, adapted) > 1e-4, "peft's base has all of its bits"
    assert difference(merged, base) > 1e-4


def test_go_on_from_an_export(tmp_path: Path) -> None:
    corpus(tmp_path, "first", "second")
    write_tiny("mixtral", tmp_path / "model")
    tokenizer(tmp_path / "model" / "tokenizer.json")
    *_, text = recipe(EXPORT, tmp_path)
    assert text.startswith("The ")
    assert (tmp_path / "runs" / "second" / "export" / "tokenizer.json").exists()


def test_every_recipe_is_run() -> None:
    assert sections().keys() == {PRETRAIN, EXPORT, CHAT, ADAPTER, FEW_BITS}
