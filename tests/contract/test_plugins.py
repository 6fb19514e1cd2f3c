"""Built-in plug-ins fulfil the contracts of `paceline.testing`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import pytest

from paceline.isolation.sandbox import landlock
from paceline.isolation.sandbox.sandbox import Sandbox
from paceline.plugins import (
    EnvironmentPlugin,
    Guest,
    Keep,
    ProgramLimits,
    ProgramOutcome,
    Stored,
    registry,
)
from paceline.testing import (
    advantages,
    allocators,
    environments,
    filters,
    replays,
    rewards,
    samplers,
    slots,
    topologies,
    transforms,
)
from paceline.types import Task
from paceline_test_transforming import Drifting


class Fresh:
    """A sandbox per program, as each score has an event loop of its own here."""

    async def run(self, source: str, *, stdin: bytes, limits: ProgramLimits) -> ProgramOutcome:
        sandbox = Sandbox()
        try:
            return await sandbox.run(source, stdin=stdin, limits=limits)
        finally:
            await sandbox.close()


class Judges:
    """A server with a model that likes a single answer."""

    async def post(
        self, endpoint: str, path: str, body: Mapping[str, Any], *, most: int, fresh: bool = False
    ) -> dict[str, Any]:
        content = f"Score: {10 * (body['messages'][0]['content'] == '42')}"
        return {"choices": [{"message": {"content": content}}]}


REWARDS: dict[str, tuple[dict[str, Any], list[float]]] = {
    "exact": ({}, [1.0, 0.0]),
    "regex": ({"pattern": r"^\d+$"}, [1.0, 0.0]),
    "environment": ({}, [0.5, 0.25]),
    "overlong": ({}, [0.0, 0.0]),
    "code": ({"programs": Fresh()}, [1.0, 0.0]),
    "format": ({"pattern": r"\d+"}, [1.0, 0.0]),
    "json_schema": ({"schema": {"type": "integer"}}, [1.0, 0.0]),
    "judge": ({"endpoints": Judges(), "model": "m", "prompt": "{response}"}, [1.0, 0.0]),
    "length": ({"tokens": 10}, [1.0, 1.0]),
    "math": ({}, [1.0, 0.0]),
    "numeric": ({}, [1.0, 0.0]),
    # Their variant says that the whole response is the answer, and that there are no tags.
    "template_answer": ({}, [1.0, 0.0]),
    "template_format": ({}, [1.0, 1.0]),
}
FILTERS: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "zero_variance": ({}, [(1.0, 1.0)], []),
    "mean_reward": ({"high": 0.6}, [(0.0, 0.0), (1.0, 1.0), (1.0, 1.0, 0.0)], []),
    "balanced": (
        {"keep": 3},
        [],
        [
            ((1.0, 1.0), (0, 1)),
            ((0.0, 0.0, 1.0, 1.0, 1.0), (0, 1, 2)),
            ((0.0, 0.0, 0.0, 0.0, 1.0, 1.0), (0, 1, 4)),
            ((1.0, 1.0, 1.0, 0.5), (0, 1, 3)),
            ((1.0, 1.0, 1.0, 1.0), (0, 1, 2)),
        ],
    ),
}


SILENT = {"inputs": ["1"], "outputs": [""]}


def built_in(kind: str) -> list[str]:
    return sorted(registry.built_in(kind))


def answer(task: Task) -> str:
    payload = json.loads(task.payload)
    return str(payload["number"] if "number" in payload else payload["answer"])


# openenv needs a server, verifiers its library: see tests/integration/test_environment_adapters.py;
# dataset needs data: tests/unit/paceline/data.
ELSEWHERE = {"dataset", "openenv", "verifiers"}
LAKE = {"id": "FrozenLake-v1", "kwargs": {"is_slippery": False, "desc": ["SFFG"]}}
MIXED = {"mixture": {"1-plain": 0.5, "2-carry": 0.5}, "wrong_labels": 0.2, "size": 50}
# What one answer, given in every turn, is worth; the second turn of a chain has another answer.
ENVIRONMENTS: dict[str, tuple[dict[str, Any], Callable[[Task], str], float]] = {
    "arithmetic": (MIXED, answer, 1.0),
    "chain": ({"length": 2}, lambda task: json.loads(task.payload)["answers"][0], 0.0),
    "guess_number": ({"span": 3}, answer, 1.0),
    "gymnasium": (LAKE, lambda _: "2", 1.0),
    "key_door": ({"walls": 2, "scoring": "shaped"}, lambda _: "up", 0.0),
    "reasoning_gym": ({"dataset": "chain_sum", "size": 40}, answer, 1.0),
    "tools": ({}, answer, 1.0),
}


@pytest.mark.parametrize("name", sorted({*built_in("environments")} - ELSEWHERE))
def test_environments(name: str) -> None:
    options, reply, worth = ENVIRONMENTS[name]
    environments.fulfils_the_contract(name, options, answer=reply, reward=worth)


@pytest.mark.parametrize("name", built_in("topologies"))
def test_topologies(name: str) -> None:
    session = topologies.fulfils_the_contract(name)
    assert session.calls == ["reset", *["act", "step"] * 5]


# Reward workers call what `python` names in its place: tests/unit/paceline_reward/test_pool.py.
@pytest.mark.parametrize("name", sorted({*built_in("rewards")} - {"python"}))
def test_rewards(name: str) -> None:
    if name == "code" and not landlock.abi():
        pytest.skip("this kernel has no Landlock")
    options, worth = REWARDS[name]
    more: dict[str, Any] = {"answer": "42", "tests": SILENT, "variant_meta": {"tags": []}}
    items = [
        rewards.item("42", environment_reward=0.5, **more),
        rewards.item("no", environment_reward=0.25, **more),
    ]
    rewards.fulfils_the_contract(name, options, items=items, rewards=worth)


@pytest.mark.parametrize("name", built_in("filters"))
def test_filters(name: str) -> None:
    options, drops, picks = FILTERS[name]
    filters.fulfils_the_contract(name, options, keeps=[(0.0, 1.0)], drops=drops, picks=picks)


SAMPLERS: dict[str, dict[str, Any]] = {
    "difficulty_pools": {"window": 4, "easy_fraction": 0.2, "hard_fraction": 0.2},
    "staged": {"stages": [{"share": 0.4, "reward": 0.3}, {"share": 1.0}], "groups": 3},
}


def test_a_filter_that_repairs() -> None:
    picks = [((0.0, 1.0, 0.25), (1,)), ((0.0, 0.0), ())]
    filters.fulfils_the_contract("repairing", keeps=[(1.0, 1.0)], picks=picks)


@pytest.mark.parametrize("name", built_in("samplers"))
def test_samplers(name: str) -> None:
    samplers.fulfils_the_contract(name, SAMPLERS.get(name))


def test_a_sampler_that_learns() -> None:
    samplers.fulfils_the_contract("weakest", {"width": 6})


# Options, and how many episodes a group of four has in which only the first succeeds, or none.
ALLOCATORS: dict[str, tuple[dict[str, Any], int, int]] = {
    "redundancy": ({}, 4, 4),
    "dart_rollouts": ({"slack": 1.5}, 4, 4),
    "dars": ({"hopeless_share": 0.3}, 8, 5),
    "xrpo_planner": ({"seeds": 2}, 5, 4),
    "scope": ({}, 4, 5),
    "rac": ({"count": 2, "rounds": 3, "parents": 2}, 4, 10),
}


@pytest.mark.parametrize("name", built_in("allocators"))
def test_allocators(name: str) -> None:
    options, one, none = ALLOCATORS[name]
    sizes: list[tuple[Callable[[int, int], float], int]] = [
        (lambda task, index: float(task == index), one),
        (lambda task, index: 0.0, none),
    ]
    allocators.fulfils_the_contract(name, options, sizes=sizes)


def test_an_allocator_with_waves_and_a_memory() -> None:
    allocators.fulfils_the_contract("any_waves", {"seed": 3})
    sizes = [(lambda task, index: 0.0, 6), (lambda task, index: 1.0, 2)]  # pyright: ignore
    allocators.fulfils_the_contract("depth", sizes=sizes)
    allocators.fulfils_the_contract("seeding", sizes=[(lambda task, index: 0.0, 8)])  # pyright: ignore


SEEDED = transforms.context(
    variant="seeded", meta={"answers": ["3"]}, tasks=[transforms.task("1+2=", "3")]
)


@pytest.mark.parametrize("name", built_in("transforms"))
def test_transforms(name: str) -> None:
    transforms.fulfils_the_contract(name, contexts=[SEEDED])


def test_a_transform_that_adds_a_word() -> None:
    found = transforms.fulfils_the_contract("prefixed", {"prefix": "So: "})
    assert {each.text for each in found} == {"So: " + transforms.QUESTION}


def test_every_built_in_replay_is_tried() -> None:
    assert built_in("replays") == ["dart_pool", "experience_replay"]


def test_the_pool_of_dart() -> None:
    """The newest stored success joins a group that has none, in place of its first failure."""
    newest = [Stored(1.0, 3), Stored(0.75, 9)]
    replays.fulfils_the_contract(
        "dart_pool",
        keeps=[((0.0, 1.0, 0.5, 0.75), (1, 3)), ((0.0,), ())],
        offers=[
            ((0.0,) * 8, newest, [Guest(1, replaces=0)]),
            ((0.0, 1.0), newest, []),
            ((0.0,), newest, [Guest(1)]),
        ],
    )


def test_plain_replay() -> None:
    """Two join six, so that they are a quarter; those that are older than 16 steps do not."""
    pool = [Stored(0.0, step) for step in (1, 24, 30, 38)]
    replays.fulfils_the_contract(
        "experience_replay",
        {"share": 0.25},
        keeps=[((0.0, 1.0), (0, 1))],
        offers=[
            ((0.0,) * 6, pool, [Guest(2), Guest(3)]),
            ((0.0,) * 30, pool, [*map(Guest, (1, 2, 3))]),
        ],
    )


def test_a_replay_of_anything() -> None:
    replays.fulfils_the_contract("any_replay", {"seed": 5})


ADVANTAGE_OPTIONS: dict[str, dict[str, Any]] = {
    "outcome_exploration": {"coef": 0.1},
    "fapo": {"flaw": "second"},
    "dart_trim": {"keep": 2},
    "d3s_episodes": {"start": 0.25, "end": 0.5},
}


@pytest.mark.parametrize("name", built_in("advantages"))
def test_advantages(name: str) -> None:
    advantages.fulfils_the_contract(name, ADVANTAGE_OPTIONS.get(name))


SLOT_OPTIONS: dict[str, dict[str, Any]] = {
    "entropy": {"coef": 0.01},
    "kl": {"coef": 0.01},
    "kl_penalty": {"coef": 0.01},
    "d3s_tokens": {"start": 0.1, "end": 0.3},
    "seq_mean_token_sum_norm": {"norm": 8},
}


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind in registry.SLOTS for name in built_in(kind)],
)
def test_slots(kind: str, name: str) -> None:
    slots.fulfils_the_contract(kind, name, SLOT_OPTIONS.get(name))


def too_large(batch: Any, context: Any) -> Any:
    del context
    return batch.rewards * 1e99


def not_a_decision(group: Any) -> Any:
    return group.rewards[0] > 0


def beyond(group: Any) -> Keep:
    return Keep([len(group.rewards)])


def fickle() -> Any:
    answers = cycle([Keep(), Keep([0])])
    return lambda group: next(answers)  # pyright: ignore


class Forgetful:
    """Restarts from the beginning whatever state it loads."""

    def __init__(self, size: int, *, seed: int, epochs: int | None) -> None:
        del seed
        self._left = size * (epochs or 1000)

    def next(self) -> int | None:
        self._left -= 1
        return self._left % 17 if self._left >= 0 else None

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: Any) -> None:
        del state


WEAKEST: Any = registry.find("samplers", "weakest")


class Impatient(WEAKEST):
    """Draws by what it has just observed, before that is written."""

    def observe(self, outcomes: Any, context: Any) -> dict[str, Any]:
        changed = super().observe(outcomes, context)
        self.remember(changed)
        self._drawn += 1
        return changed


def per_micro_batch(losses: Any, tokens: Any, options: Any) -> Any:
    del tokens, options
    return losses.sum() / max(len(losses), 1)


def of_this_rank(tokens: Any, options: Any) -> Any:
    del options
    return tokens.logprobs * 0 + (len(tokens.logprobs) if len(tokens.logprobs) < 10 else 1.0)


for each in (per_micro_batch, of_this_rank):
    each.__annotations__["options"] = registry.options_of("aggregations", "token_mean")


async def hasty(session: Any, **options: Any) -> Any:
    del options
    await session.reset()
    return (session.transcript(),)


@dataclass(frozen=True)
class SlotSuite:
    """The suite of one kind of slot."""

    kind: str

    def fulfils_the_contract(self, plugin: Any, **more: Any) -> None:
        slots.fulfils_the_contract(self.kind, plugin, **more)


@pytest.mark.parametrize(
    ("suite", "plugin", "more", "message"),
    [
        (
            environments,
            EnvironmentPlugin(tasks=f"{__name__}:missing", world="nowhere:at_all"),
            {},
            "cannot import",
        ),
        (topologies, hasty, {}, "it returned before the end: reset"),
        (
            rewards,
            lambda item: float("nan") if not item.response else 1.0,  # pyright: ignore
            {"items": [rewards.item("42")]},
            "nan for ''; expected a finite number or Score",
        ),
        (filters, not_a_decision, {}, "the decision on .* is False; expected Keep or Drop"),
        (filters, beyond, {}, r"the decision on .*: indices \[1\] of 1 episodes"),
        (filters, "these", {"options": {"indices": [7]}}, r"indices \[7\] of 1 episodes"),
        (filters, fickle(), {"keeps": [(0.0, 1.0)]}, r"is \(0, 1\) once, then \(0,\)"),
        (filters, "balanced", {"options": {"keep": 2}, "drops": [(1.0, 1.0)]}, r"\(0, 1\) of"),
        (
            samplers,
            Forgetful,
            {},
            "rewound to its first state, it yields another order|continues with other tasks",
        ),
        (allocators, "any_waves", {"options": {"deed": "crowd"}}, "a wave of 600 episodes; 1 to"),
        (replays, "any_replay", {"options": {"deed": "crowd"}}, "nothing stays of a group of 1"),
        (replays, "any_replay", {"options": {"deed": "number"}}, "what joins a group is 0; expec"),
        (allocators, "any_waves", {"options": {"deed": "orphan"}}, "parent 99 has not finished"),
        (transforms, "faulty", {"options": {"deed": "other"}}, "the result is Observation"),
        (transforms, "faulty", {"options": {"deed": "large"}}, "more than 1024 bytes"),
        (transforms, "faulty", {"options": {"deed": "empty"}}, "the prompt is empty"),
        (transforms, Drifting(), {}, "must depend on nothing but the arguments"),
        (samplers, Impatient, {}, "`remember` or `observe` changes the cursor|draws another task"),
        (advantages, too_large, {}, "finite float32 numbers"),
        (SlotSuite("aggregations"), per_micro_batch, {}, "micro-batches: divide by tokens.scale"),
        (SlotSuite("corrections"), of_this_rank, {}, "does not add up|differs between|divide by"),
    ],
)
def test_contract_violations_are_reported(
    suite: Any, plugin: Any, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(Exception, match=message) as caught:
        suite.fulfils_the_contract(plugin, **more)
    assert isinstance(caught.value, AssertionError) or suite is environments
