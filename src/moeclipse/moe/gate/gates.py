"""Gates: which experts a token visits.

    softmax   top-k of softmax(x W^T), renormalised or not; optionally only among the best groups
    sigmoid   top-k of sigmoid(x W^T) + bias; the bias steers the choice and never the score, and moves each
              step towards even load (loss-free balancing); optionally only among the best groups
    switch    the best expert, score = its probability
    gshard    the best expert, and the second best with a chance of twice its (renormalised) score
    noisy     top-k of x W^T + noise * softplus(x V^T), scores = softmax over the chosen

With softmax and sigmoid, `gate.choose` may leave out some of the k (`moe/gate/dynamic_gates`).
Gates compute in fp32 (fp64 for fp64 models). Randomness is keyed by (seed, step, layer, global token), and
capacity is counted over the global microbatch: first choices in token order, then second choices. So a
token's experts do not depend on how tokens and experts are shared over ranks. The one exception is asked for:
`gate.max_leaving` limits what leaves this rank's node (`moe/gate/node_limit`), before capacity is counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import nn

from moeclipse.moe.config import GateConfig
from moeclipse.moe.experts.weight_init import WeightInit
from moeclipse.moe.gate.capacity import drop_low_scores, drop_over_capacity, room_for
from moeclipse.moe.gate.dynamic_gates import DynamicChoice, renormalise_used
from moeclipse.moe.gate.node_limit import limit_leaving
from moeclipse.moe.gate.routing import GateSums, Routing, best_of, count_experts
from moeclipse.moe.tokens import Tokens
from moeclipse.ops.gate import GateKind, gate, gate_fits
from moeclipse.ops.precision import WIDE
from moeclipse.ops.random import fill_normal, key_of, normal, uniform
from moeclipse.tensor.weight_grad import place_of

TINY = 1e-20
"""Added to a sum of scores that is divided by."""


class Gate(nn.Module):
    bias_E: torch.Tensor
    near_E: torch.Tensor | None
    """Which experts are on this rank's node; None: all, so that nothing leaves it."""

    def __init__(
        self,
        config: GateConfig,
        *,
        d_model: int,
        num_experts: int,
        init: WeightInit = WeightInit(),  # noqa: B008  (frozen)
    ) -> None:
        super().__init__()
        self.config, self.num_experts = config, num_experts
        self.layer, self.seed, self.init_std = init.layer, init.seed, init.std
        self.weight = nn.Parameter(init.empty(num_experts, d_model))
        self.logit_bias = nn.Parameter(init.empty(num_experts)) if config.logit_bias else None
        if config.kind == "noisy":
            self.noise_weight = nn.Parameter(torch.empty_like(self.weight))
        bias_E = torch.empty(num_experts, device=init.device, dtype=WIDE[self.weight.dtype])
        self.register_buffer("bias_E", bias_E)
        self.register_buffer("near_E", None, persistent=False)
        self.dynamic = DynamicChoice(config, init.device) if config.choose != "top_k" else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """As at the start, buffers included."""
        fill_normal(self.weight, key_of(self.seed, self.layer, "gate"), self.init_std)
        if self.config.kind == "noisy":
            self.noise_weight.zero_()
        if self.logit_bias is not None:
            self.logit_bias.zero_()
        self.bias_E.zero_()
        if self.dynamic is not None:
            self.dynamic.reset_parameters()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Gate:
        """A bias that is rounded to bf16 no longer moves by its small steps: it stays in the wide type."""
        before = self.bias_E
        super()._apply(fn, recurse)
        wide = WIDE[self.weight.dtype]
        if self.bias_E.dtype != wide:
            self.bias_E = before.to(self.bias_E.device, wide)
        return self

    def forward(self, x_TD: torch.Tensor, tokens: Tokens) -> Routing:
        kind = x_TD.device.type
        with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext():
            return self._route(x_TD, tokens)

    @property
    def compiles(self) -> bool:
        """Whether `torch.compile` sees through it: random numbers are keyed by what only the host knows."""
        config = self.config
        bounded = config.capacity_factor or config.eval_capacity_factor > 0 or config.sample_second
        return config.kind not in ("gshard", "noisy") and not bounded

    @property
    def learns(self) -> bool:
        return self.weight.requires_grad

    @property
    def _plain(self) -> bool:
        """The best k of all experts, whatever the number of tokens, and no more."""
        config, stays = self.config, self.near_E is None or self.config.max_leaving >= 1
        alone = config.num_groups <= 1 and self.dynamic is None
        return self.compiles and stays and alone and config.renormalise_eps <= TINY

    def _route_in_kernels(self, x_TD: torch.Tensor) -> Routing:
        config = self.config
        kind = GateKind(
            k=config.top_k,
            sigmoid=config.kind == "sigmoid",
            renormalise=config.renormalise and config.kind != "switch",
            scale=config.scale,
        )
        chosen = gate(x_TD, self.weight, self.bias_E, kind, place_of(self.weight), self.logit_bias)
        return Routing(
            expert_ids_TK=chosen.ids_TK,
            scores_TK=chosen.scores_TK,
            load_E=chosen.load_E,
            sums=GateSums(prob_E=chosen.prob_E, squares=chosen.squares),
            complete=True,
        )

    def _route(self, x_TD: torch.Tensor, tokens: Tokens) -> Routing:
        if x_TD.is_cuda and self._plain and gate_fits(x_TD, self.weight, self.config.top_k):
            return self._route_in_kernels(x_TD)
        dtype = WIDE[x_TD.dtype]
        x_TD = x_TD.to(dtype)
        bias_E = None if self.logit_bias is None else self.logit_bias.to(dtype)
        logits_TE = F.linear(x_TD, self.weight.to(dtype), bias_E)
        probs_TE = torch.sigmoid(logits_TE) if self.config.kind == "sigmoid" else logits_TE.softmax(-1)
        noisy = self.config.kind == "noisy"
        values_TE = self._add_noise(x_TD, logits_TE, tokens) if noisy else probs_TE
        preference_TE = (values_TE + self.bias_E).detach()
        if self.config.kind == "sigmoid":  # dynamic choices and the loss want probabilities that sum to one
            probs_TE = probs_TE / probs_TE.sum(-1, keepdim=True)
        wanted_TK = self._choose(preference_TE)
        if self.config.sample_second and self.training:
            wanted_TK = self._sample_second(wanted_TK, logits_TE, tokens)
        used_TK = None if self.dynamic is None else self.dynamic(probs_TE.detach().gather(1, wanted_TK))
        scores_TK = self._score(values_TE, wanted_TK, used_TK)
        ids_TK = wanted_TK if used_TK is None else wanted_TK.masked_fill(~used_TK, -1)
        if self.config.kind == "gshard":
            ids_TK = self._skip_second(wanted_TK, scores_TK, tokens)
        load_E = count_experts(ids_TK, self.num_experts)
        if self.near_E is not None and self.config.max_leaving < 1:
            reroute = self.config.excess == "reroute"
            share = self.config.max_leaving
            ids_TK = limit_leaving(
                ids_TK, scores_TK, preference_TE, self.near_E, share=share, reroute=reroute
            )
            if reroute:  # an unused place keeps its share of the scores, as it does over capacity
                scores_TK = self._score(values_TE, torch.where(ids_TK >= 0, ids_TK, wanted_TK), used_TK)
        bounded = self.config.capacity_factor or self.config.eval_capacity_factor > 0
        ids_TK, capacity = self._find_room(ids_TK, scores_TK, tokens) if bounded else (ids_TK, 0)
        if capacity and self.config.renormalise_kept:
            scores_TK = renormalise_used(scores_TK, ids_TK >= 0)
        return Routing(
            expert_ids_TK=ids_TK,
            scores_TK=scores_TK * self.config.scale,
            load_E=load_E,
            probs_TE=probs_TE,
            logits_TE=logits_TE,
            capacity=capacity,
        )

    def _find_room(
        self, ids_TK: torch.Tensor, scores_TK: torch.Tensor, tokens: Tokens
    ) -> tuple[torch.Tensor, int]:
        """(the assignments within capacity, the rows that an expert takes; 0: all of them)."""
        on_rank = self.config.capacity_over == "rank"
        counted = len(ids_TK) if on_rank else tokens.total
        capacity = room_for(self.config, counted, self.num_experts, self.training)
        if not capacity:
            return ids_TK, 0
        if self.config.drop_policy == "score":
            return drop_low_scores(ids_TK, scores_TK, capacity), capacity
        given = (ids_TK, self.num_experts, capacity, tokens, self.layer)
        return drop_over_capacity(*given, on_rank=on_rank), capacity

    def _sample_second(
        self, wanted_TK: torch.Tensor, logits_TE: torch.Tensor, tokens: Tokens
    ) -> torch.Tensor:
        """In training, the second expert is drawn by the probabilities of all but the first."""
        index_T = tokens.first + torch.arange(len(logits_TE), device=logits_TE.device)
        index_TE = index_T[:, None] * self.num_experts + torch.arange(self.num_experts, device=index_T.device)
        key = key_of(self.seed, tokens.step, tokens.microbatch, self.layer, "drawn")
        gumbel_TE = -torch.log(-torch.log(uniform(key, index_TE).clamp(1e-12, 1 - 1e-7)))
        noisy_TE = logits_TE.detach() + gumbel_TE.to(logits_TE.dtype)
        second_T = noisy_TE.scatter(1, wanted_TK[:, :1], -math.inf).argmax(-1)
        return torch.stack([wanted_TK[:, 0], second_T], dim=1)

    def _choose(self, preference_TE: torch.Tensor) -> torch.Tensor:
        if self.config.num_groups > 1:
            preference_TE = self._keep_best_groups(preference_TE)
        return best_of(preference_TE, self.config.top_k)

    def _score(
        self, values_TE: torch.Tensor, ids_TK: torch.Tensor, used_TK: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The gate weight of each of these experts, or of those that the token chose to use."""
        kind, scores_TK = self.config.kind, values_TE.gather(1, ids_TK)
        if used_TK is not None:
            return renormalise_used(scores_TK, used_TK) if self.config.renormalise else scores_TK * used_TK
        if kind == "noisy":
            return scores_TK.softmax(-1)
        if kind == "gshard" or (self.config.renormalise and kind != "switch"):
            scores_TK = renormalise(scores_TK, self.config.renormalise_eps)
        return scores_TK

    def _skip_second(self, ids_TK: torch.Tensor, scores_TK: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        """In training, the second choice stays with a chance of twice its score."""
        index_T = tokens.first + torch.arange(len(ids_TK), device=ids_TK.device)
        draw_T = uniform(key_of(self.seed, tokens.step, tokens.microbatch, self.layer, "second"), index_T)
        keep_T = (draw_T < 2 * scores_TK[:, 1]) | (not self.training)
        return torch.stack([ids_TK[:, 0], torch.where(keep_T, ids_TK[:, 1], -1)], dim=1)

    def _add_noise(self, x_TD: torch.Tensor, logits_TE: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        if not self.training:
            return logits_TE
        spread_TE = F.softplus(F.linear(x_TD, self.noise_weight.to(x_TD.dtype)))
        index_T = tokens.first + torch.arange(len(x_TD), device=x_TD.device)
        index_TE = index_T[:, None] * self.num_experts + torch.arange(self.num_experts, device=x_TD.device)
        key = key_of(self.seed, tokens.step, tokens.microbatch, self.layer, "noise")
        return logits_TE + normal(key, index_TE).to(x_TD.dtype) * spread_TE

    def _keep_best_groups(self, choice_TE: torch.Tensor) -> torch.Tensor:
        choice_TGe = choice_TE.unflatten(1, (self.config.num_groups, -1))
        best = 1 if self.config.group_score == "max" else min(2, choice_TGe.shape[2])
        group_TG = choice_TGe.topk(best, dim=-1).values.sum(-1)
        kept = best_of(group_TG, self.config.top_groups)
        open_TG = torch.zeros_like(group_TG, dtype=torch.bool).scatter(1, kept, True)
        return choice_TGe.masked_fill(~open_TG[:, :, None], -math.inf).flatten(1)

    @property
    def adapts(self) -> bool:
        """Whether something in it moves once a step."""
        return self.config.bias_rate > 0 or (self.dynamic is not None and self.dynamic.moves)

    def take_seen(self) -> torch.Tensor:
        """What this rank's dynamic choice saw since it was last asked (zeros without one), int64 [3]."""
        if self.dynamic is None:
            return self.bias_E.new_zeros(3, dtype=torch.int64)
        return self.dynamic.take_seen()

    @torch.no_grad()
    def rebalance(self, global_load_E: torch.Tensor, global_seen_3: torch.Tensor | None = None) -> None:
        """Once a step, with sums over all ranks.

        Busy experts become less, idle ones more attractive, by a fixed amount; moving limits move.
        """
        if self.config.bias_rate:
            load_E = global_load_E.to(self.bias_E.dtype)
            self.bias_E += self.config.bias_rate * torch.sign(load_E.mean() - load_E)
        if self.dynamic is not None and global_seen_3 is not None:
            self.dynamic.adapt(global_seen_3)


def renormalise(scores_TK: torch.Tensor, eps: float = TINY) -> torch.Tensor:
    if scores_TK.shape[1] == 1 and eps <= TINY:
        return torch.ones_like(scores_TK)  # s / s: its gradient is zero, not what rounding leaves of it
    return scores_TK / (scores_TK.sum(-1, keepdim=True) + eps)
