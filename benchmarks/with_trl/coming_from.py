"""Records what TRL and verl compute for the rows of docs/coming-from.md.

Their own code runs on the batch of `tests/unit/paceline/methods/coming_from/cases.yaml`; the test
beside that file compares Paceline's with what is recorded. In an environment with both:

    make coming-from
"""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import trl
import yaml
from torch import Tensor
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.workers.config import ActorConfig

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests" / "unit" / "paceline" / "methods" / "coming_from"


class Padded:
    """The batch as rows of equal length."""

    def __init__(self, batch: dict[str, Any]) -> None:
        self.lengths: list[int] = batch["lengths"]
        width = max(self.lengths)
        self.mask = torch.tensor([[float(at < n) for at in range(width)] for n in self.lengths])
        for name in ("logprobs", "old", "behaviour", "reference", "entropies"):
            setattr(self, name, self.rows(batch[name]))
        self.advantages = torch.tensor(batch["advantages"])
        self.groups = np.array(batch["groups"])
        self.rewards = torch.tensor([*batch["rewards"].values()]).T.contiguous()

    def rows(self, values: list[float]) -> Tensor:
        """[N] as [episodes, tokens], with zeros."""
        out = torch.zeros_like(self.mask)
        out[self.mask.bool()] = torch.tensor(values)
        return out

    def flat(self, rows: Tensor) -> list[float]:
        """[episodes, tokens] as [N]."""
        return rows[self.mask.bool()].tolist()


class _Trainer(SimpleNamespace):
    """What methods of TRL's trainer read of it; the model's answers are those of the batch."""

    def get_high_entropy_mask(self, *arguments: Any) -> Any:
        return trl.GRPOTrainer.get_high_entropy_mask(self, *arguments)


def of_trl(theirs: dict[str, Any], batch: Padded) -> dict[str, list[float]]:
    """TRL's gradient of the loss, or its advantages."""
    names = ("scale_rewards", "multi_objective_aggregation", "rloo")
    if any(name in theirs for name in names):
        return {"advantages": _advantages_of_trl(theirs, batch)}
    args = {"use_bias_correction_kl": False, "delta": None, "steps_per_generation": 1} | theirs
    logprobs = batch.logprobs.clone().requires_grad_()
    entropies = batch.entropies.clone()
    mode = theirs.get("mode")
    trainer = _Trainer(
        args=SimpleNamespace(**args),
        beta=theirs.get("beta", 0.0),
        epsilon_low=theirs.get("epsilon", 0.2),
        epsilon_high=theirs.get("epsilon_high", 0.2),
        loss_type=theirs.get("loss_type", "dapo"),
        importance_sampling_level=theirs.get("importance_sampling_level", "token"),
        top_entropy_quantile=theirs.get("top_entropy_quantile", 1.0),
        off_policy_mask_threshold=None,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        use_vllm=mode is not None,
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=None,
        vllm_importance_sampling_clip_max=theirs.get("clip_max"),
        max_completion_length=batch.mask.shape[1],
        current_gradient_accumulation_steps=1,
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(
            num_processes=1,
            gather=lambda x: x,
            reduce=lambda x, reduction: x,
            pad_across_processes=lambda x, **_: x,
        ),
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, entropies, None),
    )
    ids = batch.mask.long()
    inputs: dict[str, Any] = {
        **{f"prompt_{name}": ids[:, :1] for name in ("ids", "mask")},
        "completion_ids": ids,
        "completion_mask": batch.mask,
        "advantages": batch.advantages,
        "old_per_token_logps": batch.old,
        "ref_per_token_logps": batch.reference,
        "num_items_in_batch": batch.mask.sum(),
    }
    if mode is not None:
        inputs["importance_sampling_ratio"] = _statements(
            trl.GRPOTrainer._generate_and_score_completions,
            "self.use_vllm and self.vllm_importance_sampling_correction",
            self=trainer,
            old_per_token_logps=batch.old,
            sampling_per_token_logps=batch.behaviour,
            completion_mask=batch.mask,
            tool_mask=None,
        )["vllm_importance_sampling_ratio"]
    trl.GRPOTrainer._compute_loss(trainer, None, inputs).backward()
    return {"gradient": batch.flat(logprobs.grad)}


def _advantages_of_trl(theirs: dict[str, Any], batch: Padded) -> list[float]:
    aggregation = theirs.get("multi_objective_aggregation", "sum_then_normalize")
    trainer = SimpleNamespace(
        multi_objective_aggregation=aggregation,
        scale_rewards=theirs.get("scale_rewards", "group"),
        reward_weights=torch.ones(2),
        reward_funcs=[None, None],
        normalize_advantages=False,
    )
    values: dict[str, Any] = {
        "self": trainer,
        "rewards_per_func": batch.rewards,
        "num_generations": 2,
        "device": "cpu",
        "unscorable_mask": torch.zeros(len(batch.lengths), dtype=torch.bool),
    }
    if "rloo" in theirs:
        method, first = trl.RLOOTrainer._generate_and_score_completions, "grouped_rewards ="
        values["rewards"] = batch.rewards.sum(1)
        return _assignments(method, first, "advantages =", **values)["advantages"].tolist()
    method = trl.GRPOTrainer._generate_and_score_completions
    test = "self.multi_objective_aggregation == 'sum_then_normalize'"
    return _statements(method, test, **values)["advantages"].tolist()


def _body(function: Any) -> tuple[list[ast.AST], dict[str, Any]]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return [*ast.walk(tree)], dict(function.__globals__)


def _statements(function: Any, test: str, **values: Any) -> dict[str, Any]:
    """Run the last `if TEST:` of a method, as it stands there; returns all its names."""
    nodes, names = _body(function)
    found = [n for n in nodes if isinstance(n, ast.If) and ast.unparse(n.test) == test]
    exec(
        compile(ast.Module([found[-1]], []), function.__qualname__, "exec"), names | values, values
    )
    return values


def _assignments(function: Any, first: str, last: str, **values: Any) -> dict[str, Any]:
    """Run a method's statements from one that begins with `first` to one that does with `last`."""
    nodes, names = _body(function)
    bodies = [n.body for n in nodes if isinstance(n, ast.FunctionDef)]
    texts = [ast.unparse(each) for each in bodies[0]]
    start = next(i for i, text in enumerate(texts) if text.startswith(first))
    end = next(i for i, text in enumerate(texts) if i >= start and text.startswith(last))
    module = ast.Module(bodies[0][start : end + 1], [])
    exec(compile(module, function.__qualname__, "exec"), names | values, values)
    return values


def of_verl(theirs: dict[str, Any], batch: Padded) -> dict[str, list[float]]:
    """Verl's gradient of the loss, or its advantages."""
    if "adv_estimator" in theirs:
        return {"advantages": _advantages_of_verl(theirs, batch)}
    logprobs = batch.logprobs.clone().requires_grad_()
    entropies = batch.entropies.clone().requires_grad_()
    agg = theirs.get("loss_agg_mode", "token-mean")
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=2,
        ppo_micro_batch_size_per_gpu=4,
        clip_ratio_low=theirs.get("clip_ratio_low", 0.2),
        clip_ratio_high=theirs.get("clip_ratio_high", 0.2),
        clip_ratio_c=theirs.get("clip_ratio_c", 1e9),
    )
    config.global_batch_info.update(
        {"loss_scale_factor": theirs["loss_scale_factor"]} if "loss_scale_factor" in theirs else {}
    )
    weights, mask = None, batch.mask
    if "rollout_is" in theirs or "rollout_rs" in theirs:
        options = {"rollout_is": None, "rollout_rs": None} | theirs
        answer = rollout_corr_helper.compute_rollout_correction_and_rejection_mask(
            old_log_prob=batch.old,
            rollout_log_prob=batch.behaviour,
            response_mask=batch.mask,
            **options,
        )
        mask = answer[1]
        weights = None if answer[0] is None else answer[0].batch["rollout_is_weights"]
    mode = theirs.get("loss_mode", "vanilla")
    loss, _ = core_algos.get_policy_loss_fn(mode)(
        old_log_prob=batch.old,
        log_prob=logprobs,
        advantages=batch.advantages[:, None].expand_as(batch.mask),
        response_mask=mask,
        loss_agg_mode="seq-mean-token-mean" if mode == "gspo" else agg,
        config=config,
        rollout_is_weights=weights,
    )
    if "kl_loss_coef" in theirs:
        kl = core_algos.kl_penalty(logprobs, batch.reference, theirs["kl_loss_type"])
        loss = loss + theirs["kl_loss_coef"] * core_algos.agg_loss(kl, mask, agg)
    if "entropy_coeff" in theirs:
        loss = loss - theirs["entropy_coeff"] * core_algos.agg_loss(entropies, mask, agg)
    loss.backward()
    numbers = {"gradient": batch.flat(logprobs.grad)}
    if entropies.grad is not None:
        numbers["gradient_of_entropies"] = batch.flat(entropies.grad)
    return numbers


def _advantages_of_verl(theirs: dict[str, Any], batch: Padded) -> list[float]:
    rewards = torch.zeros_like(batch.mask)
    last = torch.tensor(batch.lengths) - 1
    rewards[torch.arange(len(last)), last] = batch.rewards.sum(1)
    extra = {k: v for k, v in theirs.items() if k != "adv_estimator"}
    rows, _ = core_algos.get_adv_estimator_fn(theirs["adv_estimator"])(
        token_level_rewards=rewards,
        response_mask=batch.mask,
        index=batch.groups,
        config=AlgoConfig(gamma=1.0),
        **extra,
    )
    return rows[:, 0].tolist()


def main() -> None:
    """Write `recorded.json` beside the cases."""
    cases = yaml.safe_load((FOLDER / "cases.yaml").read_text())
    batch = Padded(cases["batch"])
    numbers = {
        "trl": [of_trl(case["theirs"], batch) for case in cases["trl"]],
        "verl": [of_verl(case["theirs"], batch) for case in cases["verl"]],
    }
    versions = {name: version(name) for name in ("trl", "verl", "torch")}
    text = json.dumps({"versions": versions, **numbers}, indent=1)
    (FOLDER / "recorded.json").write_text(f"{text}\n")


if __name__ == "__main__":
    main()
