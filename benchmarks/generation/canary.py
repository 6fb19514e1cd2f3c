"""Publications that an engine gets right or wrong: what the canary says of each.

Six tiny models in bfloat16. Each publication has other weights, from a walk of the policy as long
as steps of training; each is loaded once as it is, and once with a structural fault that the engine
makes after the bytes were verified. A verdict is wrong if it accepts a fault, or refuses what is
right.

    .venv/bin/python benchmarks/generation/canary.py --json benchmarks/results/canary.json
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from paceline.plugins import WeightSnapshot
from paceline.weights.canary import CanaryRule, CanaryVerdict
from paceline.weights.snapshot.staging import Staging
from paceline_harness.models.corruptions import CORRUPTIONS, MODELS, corrupted, save_lively
from paceline_harness.models.published import staged
from paceline_rollout.engines.torch.model import TorchModel
from paceline_trainer.ranks.distributed import RankGroup
from paceline_trainer.ranks.rank_info import RankInfo
from paceline_trainer.step.loading import load_policy
from paceline_trainer.step.model import PolicyModel, shard
from paceline_trainer.weights.publish import Snapshotter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from pipeline import machine
from rig.smoke import arguments as arguments_of

DTYPE = "bfloat16"
CONTEXT = 128
WALK = 0.003  # standard deviation of a step of each weight
Ratios = dict[str, list[float]]


def main() -> int:
    """Judge all publications; exit code 1 if a verdict is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--publications", type=int, default=1000)
    parser.add_argument("--models", nargs="+", default=MODELS)
    arguments = arguments_of(parser, publications=8, models=["qwen3_moe"])
    torch.set_num_threads(1)
    group = RankGroup(RankInfo())
    each = -(-arguments.publications // len(arguments.models))
    models = [judged(name, each, group) for name in arguments.models]
    group.close()
    wrong = sum(model["accepted_faults"] + model["refused_right"] for model in models)
    found = {"machine": machine(), "wrong": wrong, "models": models}
    print(json.dumps(found, indent=1))
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if wrong else 0


def judged(family: str, num: int, group: RankGroup) -> dict[str, Any]:
    """All publications of one model."""
    right: list[CanaryVerdict] = []
    faults: dict[str, list[CanaryVerdict]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        path = save_lively(family, Path(folder))
        engine = TorchModel(model_dir=path, dtype=DTYPE, max_context=CONTEXT, device="cpu")
        for index, staging in enumerate(publications(path, num, group)):
            right.append(verdict(engine, staging, staging))
            for kind in list(CORRUPTIONS)[index % len(CORRUPTIONS) :]:
                if (wrong := corrupted(staging, kind, seed=index)) is not None:
                    faults[kind].append(verdict(engine, staging, wrong))
                    break
    ratios = sorted(each.ratio for each in right)
    return {
        "model": family,
        "right": len(right),
        "refused_right": sum(not each.accepted for each in right),
        "ratio_median": round(ratios[len(ratios) // 2], 3),
        "ratio_highest": round(ratios[-1], 3),
        "faults": sum(map(len, faults.values())),
        "accepted_faults": sum(each.accepted for found in faults.values() for each in found),
        "lowest_ratios": {k: round(min(v.ratio for v in found), 1) for k, found in faults.items()},
    }


def publications(path: Path, num: int, group: RankGroup) -> Iterator[Staging]:
    """Versions of a policy that changes."""
    policy = load_policy(str(path))
    shard(policy, group, dtype=DTYPE)
    snapshotter = Snapshotter(policy, group, engine_dtype=DTYPE, dtype=DTYPE)
    chance = torch.Generator().manual_seed(0)
    for step in range(num):
        copy = snapshotter.begin(step)
        snapshotter.gather(copy)
        yield staged(copy)
        walk(policy, chance)


@torch.no_grad()
def walk(policy: PolicyModel, chance: torch.Generator) -> None:
    """Change all weights a little, as a step does."""
    with policy.in_float32():
        for parameter in policy.inner.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=chance) * WALK)
    policy.changed()


def verdict(engine: TorchModel, staging: Staging, read: WeightSnapshot) -> CanaryVerdict:
    """On what the engine has read, by the canary of what was published."""
    engine.exchange(engine.prepare(read))
    canary = staging.header.canary
    scored = [engine.score(each.tokens) for each in canary.sequences]
    return CanaryRule().verdict(canary, scored)


if __name__ == "__main__":
    sys.exit(main())
