"""What the released code of methods computes from a batch, written anew from its formulas.

Nothing here calls a part of Paceline. A function for each recipe of evidence `code` returns the
advantages [T] and the loss of one update, and says which file of which repository it follows.
`verl` without an owner is verl-project/verl at 1dda039. What a recipe leaves to the job (an
advantage beside `icepop`, a surrogate beside `tis`) is GRPO, PPO without dual clip and the mean
over tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, inf

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]
Computed = tuple[Tensor, Tensor]  # advantages [T], loss


@dataclass(frozen=True, slots=True)
class Sample:
    """A batch of N episodes and T tokens; tensors are float64 [T]."""

    rewards: Sequence[float]
    groups: Sequence[int]
    lengths: Sequence[int]
    logprobs: Tensor  # of the policy that is trained; with a gradient
    start: Tensor  # of the policy at the start of the step
    behaviour: Tensor  # of the engine
    reference: Tensor
    entropy: Tensor  # with a gradient
    ages: Tensor  # int64 [T]
    parts: Mapping[str, Sequence[float]] = field(default_factory=dict[str, Sequence[float]])
    turns: Sequence[tuple[int, int, float, bool]] = ()  # episode, tokens, score, matches the expert
    rates: Sequence[float] = ()  # MSSR's success rates before the batch

    def rows(self, values: Tensor) -> Sequence[Tensor]:
        """The values of each episode."""
        return values.split(list(self.lengths))

    def spread(self, values: Sequence[float] | Floats) -> Tensor:
        """A value of each episode, at each of its tokens."""
        return torch.tensor(np.repeat(np.asarray(values, float), self.lengths))

    def grouped(self, values: Sequence[float] | Floats) -> Iterator[tuple[Floats, list[int]]]:
        """The values of each group, and its episodes."""
        for name in dict.fromkeys(self.groups):
            own = [i for i, each in enumerate(self.groups) if each == name]
            yield np.asarray(values, float)[own], own


RELEASES: dict[str, Callable[[Sample], Computed]] = {}
SOURCES: dict[str, str] = {}
Function = Callable[[Sample], Computed]


def release(name: str, source: str) -> Callable[[Function], Function]:
    """Marks what the release of a recipe computes, as `source` has it."""

    def mark(function: Function) -> Function:
        RELEASES[name], SOURCES[name] = function, source
        return function

    return mark


# Advantages


def per_group(
    s: Sample, values: Sequence[float] | Floats, of: Callable[[Floats], Floats]
) -> Floats:
    found = np.zeros(len(s.rewards))
    for own, places in s.grouped(values):
        found[places] = of(own)
    return found


def z(r: Floats, eps: float) -> Floats:
    return (r - r.mean()) / (r.std(ddof=1) + eps)


def grpo_advantage(s: Sample) -> Tensor:
    return s.spread(per_group(s, s.rewards, lambda r: z(r, 1e-6)))


def centered(s: Sample) -> Floats:
    return per_group(s, s.rewards, lambda r: r - r.mean())


def whitened(values: Tensor) -> Tensor:
    return (values - values.mean()) / (values.var() + 1e-8).sqrt()


# Losses of tokens


def ppo(s: Sample, old: Tensor, a: Tensor, low: float, high: float, dual: float = inf) -> Tensor:
    ratio = (s.logprobs - old).clamp(-20, 20).exp()
    loss = torch.maximum(-a * ratio, -a * ratio.clamp(1 - low, 1 + high))
    return torch.where(a < 0, torch.minimum(loss, -a * dual), loss)


def sequence_ppo(s: Sample, old: Tensor, a: Tensor, low: float, high: float) -> Tensor:
    means = [row.mean() for row in s.rows((s.logprobs - old).detach())]
    own = s.spread([float(each) for each in means]) + s.logprobs - s.logprobs.detach()
    ratio = own.clamp(max=10).exp()
    return torch.maximum(-a * ratio, -a * ratio.clamp(1 - low, 1 + high))


def k3(s: Sample) -> Tensor:
    d = (s.reference - s.logprobs).clamp(-20, 20)
    return (d.exp() - d - 1).clamp(-10, 10)


def weight(s: Sample, old: Tensor) -> Tensor:
    return (old - s.behaviour).clamp(-20, 20).exp().detach()


def sequence_mean(s: Sample, losses: Tensor) -> Tensor:
    return torch.stack([row.mean() for row in s.rows(losses)]).mean()


def sequence_sum(s: Sample, losses: Tensor) -> Tensor:
    return torch.stack([row.sum() for row in s.rows(losses)]).mean()


# The releases


@release("ppo", "OpenRLHF/OpenRLHF@3c3be62 openrlhf/models/loss.py PolicyLoss")
def of_ppo(s: Sample) -> Computed:
    a = grpo_advantage(s)
    return a, ppo(s, s.behaviour, a, 0.2, 0.2).mean()


@release("grpo", "verl core_algos.py compute_grpo_outcome_advantage, compute_policy_loss_vanilla")
def of_grpo(s: Sample) -> Computed:
    a = grpo_advantage(s)
    return a, sequence_mean(s, ppo(s, s.behaviour, a, 0.2, 0.2, 3.0) + 0.04 * k3(s))


@release("dr_grpo", "sail-sg/oat@c1a074c oat/algorithms/ppo.py, with sail-sg/understand-r1-zero")
def of_dr_grpo(s: Sample) -> Computed:
    a = s.spread(centered(s))
    return a, sequence_sum(s, ppo(s, s.behaviour, a, 0.2, 0.2)) / 3000


@release("dapo", "verl-project/verl-recipe@48ea0a7 dapo/run_dapo_qwen2.5_32b.sh")
def of_dapo(s: Sample) -> Computed:
    a = grpo_advantage(s)
    return a, ppo(s, s.behaviour, a, 0.2, 0.28, 10.0).mean()


@release(
    "high_entropy",
    "Shenzhi-Wang/Beyond-the-80-20-Rule-RLVR@6f5dda6 core_algos.py get_global_entropy_top_mask",
)
def of_high_entropy(s: Sample) -> Computed:
    a = grpo_advantage(s)
    top = s.entropy.detach().topk(max(1, int(len(a) * 0.2 + 0.9999))).indices
    return a, ppo(s, s.behaviour, a, 0.2, 0.28, 10.0)[top].mean()


@release("fapo", "verl-project/verl-recipe@48ea0a7 fapo/reward_fn_reasoning.py, run_fapo_7b.sh")
def of_fapo(s: Sample) -> Computed:
    rewards = [
        r - (1.0 if flawed and r > 0 else 0.0)
        for r, flawed in zip(s.rewards, s.parts["flawed"], strict=True)
    ]
    a = s.spread(per_group(s, rewards, lambda r: z(r, 1e-6)))
    return a, ppo(s, s.behaviour, a, 0.2, 0.28, 10.0).mean()


@release("gapo", "TsingZ0/verl-GAPO@58f42b5 rollout_utils.py, core_algos.py, run_grpo.py")
def of_gapo(s: Sample) -> Computed:
    def of_group(r: Floats) -> Floats:
        order, size = np.sort(r), ceil(len(r) * 50 / 100)
        spans = [order[i + size - 1] - order[i] for i in range(len(r) - size + 1)]
        start = spans.index(min(spans))
        off = r - np.median(order[start : start + size])
        return off / (np.sqrt((off**2).sum() / (len(r) - 1)) + 1e-6)

    a = s.spread(per_group(s, s.rewards, of_group))
    return a, (ppo(s, s.behaviour, a, 0.2, 0.28, 10.0) + 0.01 * k3(s)).mean()


@release("gdpo", "NVlabs/GDPO@b080e63 trl-0.18.0-gdpo/trl/trainer/grpo_trainer.py (apply_gdpo)")
def of_gdpo(s: Sample) -> Computed:
    total = sum(per_group(s, part, lambda r: z(r, 1e-4)) for part in s.parts.values())
    a = s.spread(z(np.asarray(total), 1e-4))
    return a, ppo(s, s.start, a, 0.2, 0.2).mean()


@release("gspo", "verl core_algos.py compute_policy_loss_gspo")
def of_gspo(s: Sample) -> Computed:
    a = grpo_advantage(s)
    return a, sequence_mean(s, sequence_ppo(s, s.start, a, 3e-4, 4e-4))


@release("cispo", "verl core_algos.py compute_policy_loss_cispo")
def of_cispo(s: Sample) -> Computed:
    a = grpo_advantage(s)
    ratio = (s.logprobs.detach() - s.behaviour).clamp(-20, 20).exp()
    return a, (-ratio.clamp(max=1.2) * a * s.logprobs).mean()


@release("reinforce_pp", "verl core_algos.py compute_reinforce_plus_plus_outcome_advantage; no KL")
def of_reinforce_pp(s: Sample) -> Computed:
    a = whitened(s.spread(s.rewards))
    return a, ppo(s, s.behaviour, a, 0.2, 0.2, 3.0).mean()


@release(
    "reinforce_pp_baseline",
    "verl core_algos.py compute_reinforce_plus_plus_baseline_outcome_advantage; no KL",
)
def of_reinforce_pp_baseline(s: Sample) -> Computed:
    a = whitened(s.spread(centered(s)))
    return a, ppo(s, s.behaviour, a, 0.2, 0.2, 3.0).mean()


@release("reinforce", "verl core_algos.py compute_policy_loss_reinforce (bypass mode, token IS)")
def of_reinforce(s: Sample) -> Computed:
    a = grpo_advantage(s)
    return a, (-a * s.logprobs * weight(s, s.logprobs).clamp(max=2.0)).mean()


@release("rloo", "verl core_algos.py compute_rloo_outcome_advantage, compute_policy_loss_reinforce")
def of_rloo(s: Sample) -> Computed:
    a = s.spread(per_group(s, s.rewards, lambda r: (len(r) * r - r.sum()) / (len(r) - 1)))
    return a, sequence_sum(s, -a * s.logprobs * weight(s, s.logprobs).clamp(max=2.0))


@release("kl", "verl core_algos.py kl_penalty, type k3+")
def of_kl(s: Sample) -> Computed:
    a = grpo_advantage(s)
    k2 = 0.5 * (s.logprobs - s.reference).square()
    value = k2 - k2.detach() + k3(s).detach()
    return a, (ppo(s, s.start, a, 0.2, 0.2) + 0.001 * value).mean()


@release(
    "entropy", "verl workers/utils/losses.py ppo_loss: minus entropy_coeff x agg_loss(entropy)"
)
def of_entropy(s: Sample) -> Computed:
    a = grpo_advantage(s)
    return a, ppo(s, s.start, a, 0.2, 0.2).mean() - 0.001 * s.entropy.mean()


@release("tis", "verl rollout_corr_helper.py compute_rollout_correction_weights, token, 2.0")
def of_tis(s: Sample) -> Computed:
    a = grpo_advantage(s)
    return a, (ppo(s, s.start, a, 0.2, 0.2) * weight(s, s.start).clamp(max=2.0)).mean()


@release("icepop", "verl trainer/config/algorithm.py decoupled_token_icepop; OpenRLHF PolicyLoss")
def of_icepop(s: Sample) -> Computed:
    a, w = grpo_advantage(s), weight(s, s.start)
    return a, (ppo(s, s.start, a, 0.2, 0.2) * torch.where((w >= 0.5) & (w <= 5.0), w, 0.0)).mean()


@release("mis", "verl rollout_corr_helper.py compute_rollout_rejection_mask, token_k1, 0.5_2.0")
def of_mis(s: Sample) -> Computed:
    a, log_ratio = grpo_advantage(s), s.start - s.behaviour
    kept = (-log_ratio >= np.log(0.5)) & (-log_ratio <= np.log(2.0))
    losses = ppo(s, s.start, a, 0.2, 0.2) * weight(s, s.start).clamp(max=2.0)
    return a, losses[kept].sum() / kept.sum()


@release(
    "decoupled_ppo",
    "inclusionAI/AReaL@4aef98d functional.py ppo_actor_loss_fn, apply_rejection_sampling",
)
def of_decoupled_ppo(s: Sample) -> Computed:
    a = grpo_advantage(s)
    return a, decoupled(s, s.start, a)


def decoupled(s: Sample, proximal: Tensor, a: Tensor) -> Tensor:
    log_weight = proximal - s.behaviour
    w = torch.where(torch.isfinite(log_weight), log_weight, 0.0).exp()
    losses = ppo(s, proximal, a, 0.2, 0.2) * w
    return torch.where(w <= 5.0, losses, 0.0).sum() / len(losses)


@release(
    "old_logits_interpolated",
    "inclusionAI/AReaL@4aef98d trainer/ppo/actor.py compute_prox_logp_approximations, loglinear",
)
def of_old_logits_interpolated(s: Sample) -> Computed:
    a, theta = grpo_advantage(s), 100.0
    version = theta - s.ages
    share = torch.where(version < theta, (theta - 1.0 - version) / (theta - version), 0.0)
    moved = s.logprobs.detach() - s.behaviour
    return a, decoupled(s, s.behaviour + share.clamp(0.0, 1.0) * moved, a)


@release("m2po_release", "Infini-AI-Lab/M2PO@af54a3e core_algos.py compute_m2po_policy_loss")
def of_m2po_release(s: Sample) -> Computed:
    a = grpo_advantage(s)
    delta = (s.logprobs - s.behaviour).detach()
    harmful = ((a > 0) & (delta > 0)) | ((a < 0) & (delta < 0))
    v = sorted(delta[harmful].square().tolist())
    low, high = 0.0, 1e5
    if sum(v) > 0.04 * len(v):
        reached = [sum(v[: k + 1]) + each * (len(v) - k - 1) for k, each in enumerate(v)]
        k = next(k for k, each in enumerate(reached) if each >= 0.04 * len(v))
        t = v[k - 1] ** 0.5 if k else 0.0
        low, high = np.exp(-t), np.exp(t)
    return a, ppo(s, s.behaviour, a, 1 - low, high - 1).mean()


@release("mssr", "ruiiu/MSSR@3dd0f13 core_algos.py compute_mvsr_advantage; config_mssr.yaml")
def of_mssr(s: Sample) -> Computed:
    off = np.asarray(s.rewards) - np.asarray(s.rates)
    a = s.spread((off - off.mean()) / np.sqrt(max(off.var(), 1e-6)))
    shaped = a + torch.minimum(-0.4 * s.start.exp() * s.start, a.abs() / 2.0)
    return a, (ppo(s, s.start, shaped, 0.2, 0.3, 3.0) + 0.01 * k3(s)).mean()


@release("ui_s1", "X-PLUG/MobileAgent@93afb00 UI-S1/uis1/core_uis1.py, scripts/train_example.sh")
def of_ui_s1(s: Sample) -> Computed:
    returns = [score for _, _, score, _ in s.turns]
    for i in reversed(range(len(s.turns) - 1)):
        follows = s.turns[i + 1][0] == s.turns[i][0] and s.turns[i + 1][3]
        returns[i] += 0.5 * returns[i + 1] * (follows and s.turns[i][3])
    indices = [[t[0] for t in s.turns[:i]].count(t[0]) for i, t in enumerate(s.turns)]
    groups = [s.groups[episode] for episode, *_ in s.turns]

    def compared(values: Sequence[float], cells: Sequence[object], alone: float) -> Floats:
        found = np.zeros(len(values))
        for cell in set(cells):
            own = [i for i, each in enumerate(cells) if each == cell]
            mine = np.array(values)[own]
            found[own] = z(mine, 1e-6) if len(own) > 1 else alone * mine / (1.0 + 1e-6)
        return found

    by_step = compared(returns, list(zip(groups, indices, strict=True)), alone=0.0)
    values = by_step + compared([score for _, _, score, _ in s.turns], groups, alone=1.0)
    a = torch.tensor(np.repeat(values, [tokens for _, tokens, _, _ in s.turns]))
    return a, (ppo(s, s.start, a, 0.2, 0.2, 3.0) + 1e-4 * k3(s)).mean()


@release("vcpo", "mit-han-lab/vcpo@c7f030f shell/vcpo/math/vcpo_k=10.sh without grad_baselining")
def of_vcpo(s: Sample) -> Computed:
    a = grpo_advantage(s)
    sums = [float(row.sum()) for row in s.rows(s.logprobs.detach() - s.behaviour)]
    weights = s.spread(np.minimum(np.exp(np.clip(sums, -20, 20)), 8.0))
    return a, sequence_mean(s, -a * s.logprobs * weights)


@release("dart", "Computer-use-agents/dart-gui@e0e606d core_algos.py compute_policy_loss_gspo")
def of_dart(s: Sample) -> Computed:
    a = grpo_advantage(s)
    losses = sequence_ppo(s, s.start, a, 0.1, 0.28) * weight(s, s.start).clamp(max=1.0)
    return a, sequence_mean(s, losses + 0.1 * k3(s))


@release("dars", "yangzhch6/DARS@9b21b71 verl/verl/trainer/ppo/core_algos.py compute_policy_loss")
@release("dars_b", "yangzhch6/DARS@9b21b71 experiments/DARS-1.5B-HW-Breadth.sh; no entropy bonus")
def of_dars(s: Sample) -> Computed:
    """The release divides by the number of its micro-batches, ours by that of sequences."""
    a = s.spread(centered(s))
    return a, ppo(s, s.start, a, 0.2, 0.2).sum() / 3072 / len(s.rewards)


@release(
    "prompt_augmentation", "wenquanlu/prompt-augmentation-GRPO@ff1ded4 core_algos.py, run_*.sh"
)
def of_prompt_augmentation(s: Sample) -> Computed:
    a = grpo_advantage(s)
    return a, ppo(s, s.behaviour, a, 0.2, 0.28, 3.0).mean()
