"""Inference with tensor parallelism: each rank has a part of every layer, and sums join the parts.

    torchrun --standalone --nproc-per-node 2 examples/tensor_parallel_inference.py [--device cuda]

A toy language model greedily continues four prompts. It shows three calls of `PeerAllReduce` that training
has no use for:

    share                 the buffer of prompts stays: on a device peers read it where it lies
    all_reduce_rms_norm   the sum of a layer, the residual and the next layer's norm are one pass
    capture               on a device a whole token, sums included, is one graph, replayed for the next ones

Each rank also computes the whole model alone and compares: the tokens are the same. Several ranks on one GPU
need MPS and TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

from moeclipse import Mesh, PeerAllReduce

VOCAB, D, D_FF, LAYERS, SEQUENCES, PROMPT = 64, 64, 256, 4, 4, 16


@dataclass(frozen=True)
class Model:
    """Rows of the vocabulary `first` to `first + len(embedding)`, and a part of each layer's hidden width."""

    embedding: torch.Tensor
    up: list[torch.Tensor]
    down: list[torch.Tensor]
    norms: list[torch.Tensor]
    first: int

    @classmethod
    def part(cls, index: int, parts: int, device: torch.device) -> Model:
        """Weights depend on the seed alone, so that all ranks cut the same model."""
        source = torch.Generator().manual_seed(0)

        def weight(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=source) * shape[-1] ** -0.5

        def cut(whole: torch.Tensor, dim: int = 0) -> torch.Tensor:
            return whole.chunk(parts, dim)[index].contiguous().to(device)

        return cls(
            embedding=cut(weight(VOCAB, D)),
            up=[cut(weight(D_FF, D)) for _ in range(LAYERS)],
            down=[cut(weight(D, D_FF), dim=1) for _ in range(LAYERS)],
            norms=[torch.ones(D, device=device) for _ in range(LAYERS + 1)],
            first=index * (VOCAB // parts),
        )

    def embed(self, tokens: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Of tokens in this part; zeros for the others."""
        place = tokens - self.first
        mine = (place >= 0) & (place < len(self.embedding))
        return torch.mul(self.embedding[place.clamp(0, len(self.embedding) - 1)], mine[..., None], out=out)


def forward(model: Model, reduce: PeerAllReduce, tokens: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The next token of each sequence; `x` is where embeddings are summed."""
    h = reduce.all_reduce(model.embed(tokens, x), out=x, label="embeddings")
    normed = F.rms_norm(h, (D,), model.norms[0])
    for up, down, norm in zip(model.up, model.down, model.norms[1:], strict=True):
        partial = F.silu(normed @ up.t()) @ down.t()
        normed, h = reduce.all_reduce_rms_norm(partial, h, norm)
    # Each rank scores its part of the vocabulary; the best of all ranks is found in the sum.
    scores = normed.new_zeros(*tokens.shape, VOCAB)
    scores[..., model.first : model.first + len(model.embedding)] = normed @ model.embedding.t()
    return reduce.all_reduce(scores, out=scores, label="scores").argmax(-1)


def as_graph(
    step: Callable[[torch.Tensor], torch.Tensor], reduce: PeerAllReduce, tokens: torch.Tensor
) -> Callable[[torch.Tensor], torch.Tensor]:
    """`step`, captured once; peers learn where the graph's inputs lie when the block ends."""
    given, graph = tokens.clone(), torch.cuda.CUDAGraph()
    step(given)  # what is compiled or allocated by a first call is not captured
    with reduce.capture(torch.float32), torch.cuda.graph(graph):
        found = step(given)

    def replay(tokens: torch.Tensor) -> torch.Tensor:
        given.copy_(tokens)
        graph.replay()
        return found

    return replay


def generate(model: Model, reduce: PeerAllReduce, prompts: torch.Tensor, num_tokens: int) -> torch.Tensor:
    x = reduce.share(torch.empty(*prompts.shape, D, device=prompts.device))
    found = [forward(model, reduce, prompts, x)[:, -1]]
    reduce.unshare(x)
    last = torch.empty(len(prompts), D, device=prompts.device)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        return forward(model, reduce, tokens, last)

    captured = prompts.is_cuda and not reduce.obstacle
    continue_with = as_graph(step, reduce, found[0]) if captured else step
    for _ in range(num_tokens - 1):
        found.append(continue_with(found[-1]).clone())
    reduce.check()
    return torch.stack(found, dim=1)


def main() -> None:
    parser = argparse.ArgumentParser(description="Greedy decoding over tensor-parallel ranks.")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--tokens", type=int, default=32)
    options = parser.parse_args()
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group("gloo")
    mesh = Mesh.of_world(tp=dist.get_world_size(), device=device)
    prompts = torch.arange(SEQUENCES * PROMPT, device=device).view(SEQUENCES, PROMPT) * 7 % VOCAB
    with torch.no_grad(), PeerAllReduce.open(mesh.tensor, mesh.watch, device) as reduce:
        part = Model.part(mesh.rank, mesh.tp, device)
        begun = time.perf_counter()
        tokens = generate(part, reduce, prompts, options.tokens)
        seconds = time.perf_counter() - begun
        alone = PeerAllReduce.open(Mesh.single(device).world, mesh.watch, device)
        expected = generate(Model.part(0, 1, device), alone, prompts, options.tokens)
        same = torch.equal(tokens, expected)
        way = reduce.obstacle or reduce.should_use(prompts.float()).why
        print(f"rank {mesh.rank}: {tokens.numel()} tokens in {seconds:.3f} s, as one rank: {same} ({way})")
    dist.destroy_process_group()
    raise SystemExit(not same)


if __name__ == "__main__":
    main()
