"""Routing: which experts a token goes to, and with what weights. Pure functions over logits, in float32.

Ties go to the lower index, on every device. Legend: T tokens, X experts (and zero experts), S chosen, G groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.nn.functional as F

from jackfield.errors import CheckpointError, did_you_mean
from jackfield.interfaces import MoEConfig

Routed = tuple[torch.Tensor, torch.Tensor]
"""Weights [T, S] (float32) and expert indices [T, S] (int64)."""


def _plain(x: torch.Tensor) -> torch.Tensor:
    return x


def _softmax(x: torch.Tensor) -> torch.Tensor:
    return x.softmax(-1)


Step = Callable[[torch.Tensor], torch.Tensor]

SCORES: Mapping[str, tuple[Step, Step]] = {
    "softmax": (_softmax, _plain),
    "sigmoid": (torch.sigmoid, _plain),
    "sqrtsoftplus": (lambda x: F.softplus(x).sqrt(), _plain),
    "softmax_chosen": (_plain, _softmax),
    "sigmoid_chosen": (_plain, torch.sigmoid),
}
"""What is done to all logits before the choice, and to the chosen ones after it."""
UNSCORED = "none"
"""Logits are taken as they are, for the choice and for the weights."""
STEPS: Mapping[str, tuple[Step, Step]] = {**SCORES, UNSCORED: (_plain, _plain)}
"""With what no published op does."""
GROUP_SCORES = ("max", "top2")


def route(logits_TX: torch.Tensor, config: MoEConfig, bias_X: torch.Tensor | None = None) -> Routed:
    """Return the weights and experts of each token.

    Args:
        logits_TX: of the router. config: how to choose. bias_X: added to scores where experts are chosen, and not to
            weights (arXiv:2408.15664), or None.
    """
    logits_TX = logits_TX.float()
    if config.route is not None:
        return config.route(logits_TX, config, bias_X)
    if config.scoring in OTHERS:
        return OTHERS[config.scoring](logits_TX, config)
    before, after = STEPS[config.scoring]
    scores_TX = before(logits_TX)
    choice_TX = scores_TX if bias_X is None else scores_TX + bias_X.float()
    if config.num_groups > 1:
        choice_TX = in_best_groups(choice_TX, config)
    experts_TS = highest(choice_TX, config.top_k)
    weights_TS = after(scores_TX.gather(1, experts_TS))
    if config.renormalize:
        weights_TS = weights_TS / weights_TS.sum(-1, keepdim=True).clamp_min(config.floor)
    return weights_TS * config.scale, experts_TS


def highest(scores_TX: torch.Tensor, count: int) -> torch.Tensor:
    """Return the indices [T, count] of the highest scores, best first; of equal ones the lower index comes first."""
    return scores_TX.argsort(dim=-1, descending=True, stable=True)[:, :count]


def in_best_groups(choice_TX: torch.Tensor, config: MoEConfig) -> torch.Tensor:
    """Return scores with minus infinity outside the best groups (DeepSeek-V2, arXiv:2405.04434; V3, 2412.19437)."""
    grouped = torch.unflatten(choice_TX, 1, (config.num_groups, -1))
    score_TG = grouped.amax(-1) if config.group_score == "max" else grouped.topk(2, -1).values.sum(-1)
    best = highest(score_TG, config.top_groups)
    out = torch.ones_like(score_TG, dtype=torch.bool).scatter_(1, best, False)
    return grouped.masked_fill(out.unsqueeze(-1), float("-inf")).flatten(1)


def sparsemixer(logits_TX: torch.Tensor, config: MoEConfig) -> Routed:
    """Return experts chosen one after another, each weighed against the logits near it alone (SparseMixer,
    arXiv:2409.12136, as it is at inference).
    """
    left, weights, experts = logits_TX, [], []
    for _ in range(config.top_k):
        expert_T1 = highest(left, 1)
        best_T1 = left.gather(1, expert_T1)
        far = (best_T1 - logits_TX) / torch.maximum(logits_TX.abs(), best_T1) > 2 * config.jitter
        weights.append(left.masked_fill(far, float("-inf")).softmax(-1).gather(1, expert_T1))
        experts.append(expert_T1)
        left = left.scatter(1, expert_T1, float("-inf"))
    return torch.cat(weights, 1) * config.scale, torch.cat(experts, 1)


def _simulated(logits_TX: torch.Tensor, config: MoEConfig, slope: float) -> Routed:
    """Return experts drawn without replacement from numbers that look random and are the same in every run; the
    likelihood of expert x goes with (x + 1) ** -slope.
    """
    tokens, count = logits_TX.shape
    token = torch.arange(tokens, device=logits_TX.device).unsqueeze(1)
    expert = torch.arange(count, device=logits_TX.device)
    noise = torch.frac(torch.sin(token * 12.9898 + expert * 78.233) * 43758.5453).abs().clamp(1e-6, 1 - 1e-6)
    likely = -slope * torch.log(expert + 1.0) - torch.log(-torch.log(noise))
    weights = torch.full((tokens, config.top_k), config.scale / config.top_k, device=logits_TX.device)
    return weights, highest(likely, config.top_k)


OTHERS: Mapping[str, Callable[[torch.Tensor, MoEConfig], Routed]] = {
    "sparsemixer": sparsemixer,
    "simulated_uniform": lambda logits, config: _simulated(logits, config, 0.0),
    "simulated_skewed": lambda logits, config: _simulated(logits, config, 1.0),
}


def check_routing(config: MoEConfig) -> None:
    """Refuse a block that cannot be routed.

    Raises:
        CheckpointError: lists everything that is wrong.
    """
    wrong = list(_unfit(config))
    if wrong:
        raise CheckpointError(
            f"tokens cannot be routed: {'; '.join(wrong)}",
            field="experts",
            value=config.num_experts,
            remedy=did_you_mean(config.scoring, (*STEPS, *OTHERS)) or "correct the model's config.json",
        )


def _unfit(config: MoEConfig) -> Iterator[str]:
    count = config.num_experts + config.zero_experts
    if config.route is None and config.scoring not in (*STEPS, *OTHERS):
        yield f"the scoring '{config.scoring}' is not known"
    if config.scoring == UNSCORED and config.renormalize:
        yield "logits that are weights have no sum that they could be divided by"
    if config.group_score not in GROUP_SCORES:
        yield f"the score of groups '{config.group_score}' is not known"
    if not 0 < config.top_k <= count:
        yield f"{config.top_k} of {count} experts cannot be chosen"
    if config.num_groups <= 1:
        return
    size, rest = divmod(count, config.num_groups)
    if rest:
        yield f"{count} experts are not {config.num_groups} equal groups"
    elif config.group_score == "top2" and size < 2:
        yield "groups of one expert have no two best"
    if not 0 < config.top_groups <= config.num_groups or config.top_groups * size < config.top_k:
        yield f"{config.top_groups} of {config.num_groups} groups do not have {config.top_k} experts"
