"""Filters and advantages that came with a job: in a sealed process, and equal to installed ones."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from paceline.config import JobSpec
from paceline.config.job import RewardSpec
from paceline.config.named import NamedPlugin, own_ledger_parts
from paceline.errors import InvalidError, PacelineError
from paceline.isolation.code.ledger_messages import context_fields, context_of
from paceline.isolation.sandbox import landlock
from paceline.plugins import Context, EpisodeBatch, FinishedGroup, GroupOutcome, registry
from paceline.testing.engines import wait_for
from paceline_experience.jobs.job_parts import JobParts
from paceline_experience.ledger.advantages.episodes import trial_batch
from paceline_experience.ledger.advantages.estimate import called
from paceline_experience.ledger.filters.chain import answered, trial_group
from paceline_experience.ledger.generation.memory import Memory
from paceline_harness.patience import PATIENCE_S
from paceline_harness.processes import sealed_processes

if TYPE_CHECKING:
    from conftest import OwnCode

    from paceline_experience.jobs.own_functions import OwnFunctions
    from paceline_experience.ledger.own.parts import OwnParts

pytestmark = pytest.mark.skipif(landlock.abi() < 6, reason="needs Landlock with scopes")

DEEDS = '''
"""Filters that do what filters should not, once a job runs."""
import json, os, signal, struct, sys, time
from typing import Annotated
from pydantic import Field
from paceline.plugins import Advantages, Drop, Keep, Repair, declares

CALLS = []


def deed(group, *, what: str = "", where: str = "", sure: bool = False):
    """Tried at submit on two rewards; a job has four."""
    if len(group.rewards) == 2 and not sure:
        return Keep()
    try:
        if what == "loop":
            while True:
                pass
        elif what == "memory":
            bytearray(64 << 30)
        elif what == "print":
            print("x" * (64 << 20))
        elif what == "flood":
            for fd in range(3, 64):
                try:
                    os.write(fd, struct.pack(">I", 1 << 30) + b"x" * 100_000)
                except OSError:
                    pass
        elif what == "lie":
            number = sys._getframe(1).f_locals["call"].number
            body = json.dumps({"$id": number, "kept": [7]}).encode()
            for fd in range(3, 64):
                try:
                    os.write(fd, struct.pack(">I", len(body)) + body)
                except OSError:
                    pass
            os._exit(0)
        elif what == "exit":
            os._exit(3)
        elif what == "raise":
            raise RuntimeError("a bug in the filter")
        elif what == "wrong":
            return 5
        elif what == "mask":
            return Keep([True, False, True, False])
        elif what == "kill":
            os.kill(int(where), signal.SIGKILL)
        elif what == "fork":
            os.fork()
        elif what == "daemon":
            os.setsid()
            os.fork()
        elif what == "read":
            open(where).read()
        elif what == "environ":
            return Drop("") if any("SECRET" in name for name in os.environ) else Keep()
        elif what == "repair":
            return Repair([1, 3])
        elif what == "count":
            CALLS.append(1)
            return Keep(range(min(len(CALLS), len(group.rewards))))
    except OSError:
        return Drop("not allowed")
    return Keep()


def typed(group, *, most: Annotated[int, Field(ge=1)] = 3):
    return Keep(tuple(range(min(most, len(group.rewards)))))


@declares(needs=("group>=2",))
def compares(group):
    return Keep()


@declares(needs=("memory",))
def remembers(batch, context, *, size: int = 0):
    if size:
        return Advantages(batch.rewards, memory={str(n): "x" * 4000 for n in range(size)})
    return batch.rewards


def infinite(batch, context):
    return batch.rewards / 0


NOTHING = 5
'''
# The built-in plug-ins as a job's own code: the same functions in another process.
SAME = """
from paceline.generation.filters.balanced import balanced
from paceline.generation.filters.zero_variance import zero_variance
from paceline.methods.dr_grpo.advantage import *
from paceline.methods.grpo.advantage import grpo
"""
PLUGINS = Path(__file__).parents[3] / "plugins"


@pytest.fixture
def functions(own_code: OwnCode) -> OwnFunctions:
    remembering = (PLUGINS / "paceline_test_remembering.py").read_text()
    return own_code({"deeds.py": DEEDS, "same.py": SAME, "remembering.py": remembering})


def spec_of(**experience: Any) -> JobSpec:
    return JobSpec.model_validate(
        {
            "name": "own",
            "model": {"path": "m"},
            "code": {"digest": "0" * 64},
            "tasks": {"environment": "arithmetic"},
            "reward": [{"kind": "exact"}],
            "experience": {"filters": [], **experience},
        }
    )


def with_deed(what: str, **options: Any) -> JobSpec:
    return spec_of(filters=[{"kind": "deeds:deed", "what": what, **options}])


async def ready(
    functions: OwnFunctions, spec: JobSpec, job_id: str = "j"
) -> tuple[OwnParts, NamedPlugin]:
    await functions.check(JobParts(spec))
    return await functions.of(job_id, JobParts(spec)), own_ledger_parts(spec)[0]


def group_of(*rewards: float) -> FinishedGroup:
    n = len(rewards)
    parts = {"a": rewards, "b": (float("nan"),) * n}
    return FinishedGroup(3, rewards, ("x",) * n, (4,) * n, (False,) * n, parts)


GROUP = group_of(0.0, 1.0, 0.1 + 0.2, 1e-300)


@pytest.mark.parametrize(
    ("experience", "problem"),
    [
        ({"filters": ["deeds:typo"]}, r"experience.filters.0.kind: cannot import 'deeds:typo'"),
        ({"filters": ["deeds:NOTHING"]}, r"experience.filters.0.kind: .* is a int, no function"),
        (
            {"filters": ["deeds:compares", {"kind": "deeds:typed", "most": 0}]},
            r"experience.filters.1.most: .*greater than or equal to 1 \(got 0\)",
        ),
        (
            {"filters": [{"kind": "deeds:typed", "least": 0}]},
            r"experience.filters.0.least: unknown option of 'deeds:typed'; allowed: most",
        ),
        (
            {"filters": ["deeds:compares"], "group_size": 1},
            r"experience.group_size: 1 with filter 'deeds:compares'",
        ),
        (
            {"filters": [{"kind": "deeds:deed", "what": "raise", "sure": True}]},
            r"experience.filters.0: deeds:deed: RuntimeError: a bug in the filter \(deeds.py:\d+\)",
        ),
        (
            {"advantage": {"kind": "remembering:stored_mean", "size": "big"}},
            r"experience.advantage.size: .*valid integer \(got 'big'\)",
        ),
        ({"advantage": "deeds:infinite"}, r"experience.advantage: deeds:infinite: ValueError: fin"),
        ({"advantage": "deeds:compares"}, r"experience.advantage.*deeds:compares"),
    ],
)
async def test_what_is_wrong_is_heard_at_submit(
    functions: OwnFunctions, experience: dict[str, Any], problem: str
) -> None:
    with pytest.raises(InvalidError, match=problem):
        await functions.check(JobParts(spec_of(**experience)))


REWARDS = """
def right(item, *, scale: float = 1.0):
    raise RuntimeError("rewards are not called at submit")


def trl(completions, answer, **kwargs):
    return [1.0 for each in completions]


def nothing(*, scale=1.0):
    return 1.0


def by_place(item, words):
    return 1.0
"""


@pytest.mark.parametrize(
    ("reward", "problem"),
    [
        ({"kind": "scores:wright"}, "reward.0.kind: cannot import 'scores:wright': module"),
        ({"kind": "scores:right", "scale": "big"}, r"reward.0.scale: .*valid number \(got 'big'"),
        ({"kind": "scores:right", "sale": 1}, "reward.0.sale: unknown option of .*allowed: scale"),
        ({"kind": "scores:trl"}, r"reward.0.kind: scores:trl takes \(completions, answer, \*\*kw"),
        ({"kind": "scores:nothing"}, r"def nothing\(item, \*, option=1.0\)"),
        ({"kind": "scores:by_place"}, r"scores:by_place takes \(item, words\)"),
        ({"kind": "broken:score"}, r"reward.0.kind: broken:score: SyntaxError: expected ':'"),
        (
            {"kind": "lacking:score"},
            r"No module named 'sypmy' \(lacking.py:1\); name its package in requirements.txt",
        ),
    ],
)
async def test_a_reward_that_cannot_be_called_is_refused_at_submit(
    own_code: OwnCode, reward: dict[str, Any], problem: str
) -> None:
    broken, lacking = "def score(item)\n    return 1.0\n", "import sypmy\n"
    functions = own_code({"scores.py": REWARDS, "broken.py": broken, "lacking.py": lacking})
    with pytest.raises(InvalidError, match=problem):
        await functions.check(JobParts(spec_of().model_copy(update=rewarded(reward))))


@pytest.mark.parametrize(
    "reward", [{"kind": "scores:right", "scale": 2.0}, {"kind": "scores:by_place", "words": 3}]
)
async def test_a_reward_is_imported_at_submit_and_not_called(
    own_code: OwnCode, reward: dict[str, Any]
) -> None:
    await own_code({"scores.py": REWARDS}).check(
        JobParts(spec_of().model_copy(update=rewarded(reward)))
    )


def rewarded(reward: dict[str, Any]) -> dict[str, Any]:
    return {"reward": (RewardSpec.model_validate(reward),)}


@pytest.mark.parametrize(
    ("what", "problem"),
    [
        ("loop", "did not answer within 3 s"),
        ("memory", "MemoryError"),
        ("print", "did not answer within 3 s"),
        ("flood", "answered with 1073741824 bytes"),
        ("lie", "ValueError: indices \\[7\\] of 4 episodes"),
        ("exit", "its process has ended \\(exit code 3"),
        ("raise", "RuntimeError: a bug in the filter"),
        ("wrong", "TypeError: an answer of type int; Keep, Drop or Repair is due"),
        ("mask", "TypeError: indices of episodes are due, not a mask"),
    ],
)
async def test_a_filter_that_fails_is_named_and_the_next_call_works(
    own_code: OwnCode, what: str, problem: str
) -> None:
    # Only what hangs is to be late.
    functions = own_code({"deeds.py": DEEDS}, call_s=3.0 if "3 s" in problem else PATIENCE_S)
    parts, plugin = await ready(functions, with_deed(what))
    with pytest.raises(InvalidError, match=f"experience.filters.0: deeds:deed: {problem}"):
        await parts.decided(plugin, GROUP)
    assert (await parts.decided(plugin, trial_group(["exact"]))).kept == (0, 1)


async def test_nothing_outside_is_within_reach(
    functions: OwnFunctions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x")
    monkeypatch.setenv("PACELINE_SECRET", "x")
    parent = os.getpid()
    deeds = [("kill", str(parent)), ("fork", ""), ("daemon", ""), ("read", str(secret))]
    for number, (what, where) in enumerate(deeds):
        parts, plugin = await ready(functions, with_deed(what, where=where), f"j{number}")
        assert (await parts.decided(plugin, GROUP)).kept == (), what
    parts, plugin = await ready(functions, with_deed("environ"))
    assert (await parts.decided(plugin, GROUP)).kept == (0, 1, 2, 3)


async def test_a_job_that_hangs_delays_no_other_and_ends_at_once(functions: OwnFunctions) -> None:
    hanging, plugin = await ready(functions, with_deed("loop"), "hanging")
    healthy, other = await ready(functions, with_deed(""), "healthy")
    call = asyncio.create_task(hanging.decided(plugin, GROUP))
    await asyncio.sleep(0.2)
    for _ in range(20):
        assert (await healthy.decided(other, GROUP)).kept == (0, 1, 2, 3)
    assert not call.done()
    assert len(sealed_processes()) == 2
    functions.end("hanging")
    with pytest.raises(PacelineError, match="the job is over"):
        await asyncio.wait_for(call, PATIENCE_S)
    await wait_for(lambda: len(sealed_processes()) == 1, PATIENCE_S)
    assert (await healthy.decided(other, GROUP)).kept == (0, 1, 2, 3)


async def test_a_filter_may_repair(functions: OwnFunctions) -> None:
    parts, plugin = await ready(functions, with_deed("repair"))
    found = await parts.decided(plugin, GROUP)
    assert (found.kept, found.repair) == ((0, 1, 2, 3), (1, 3))


async def test_a_process_stays_until_it_dies(functions: OwnFunctions) -> None:
    parts, plugin = await ready(functions, with_deed("count"))
    assert [len((await parts.decided(plugin, GROUP)).kept) for _ in range(3)] == [1, 2, 3]
    (child,) = sealed_processes()
    child.kill()
    assert len((await parts.decided(plugin, GROUP)).kept) == 1


async def test_code_that_would_hang_is_not_asked_when_its_job_is_opened_again(
    own_code: OwnCode, tmp_path: Path
) -> None:
    first = own_code({"mine.py": DEEDS})
    spec = spec_of(advantage="mine:remembers", filters=["mine:typed"])
    await first.check(JobParts(spec))
    again = own_code({"mine.py": "while True: pass"}, call_s=3.0)
    parts = await again.of("j", JobParts(spec))
    plugins = own_ledger_parts(spec)
    assert [parts.needs(each) for each in plugins] == [set(), {"memory"}]
    with pytest.raises(InvalidError, match=r"mine:typed: did not answer within 3 s"):
        await parts.decided(plugins[0], GROUP)


async def test_jobs_take_turns_when_there_are_more_than_processes(functions: OwnFunctions) -> None:
    found = [await ready(functions, with_deed("count"), f"j{n}") for n in range(8)]
    for _ in range(2):
        told = await asyncio.gather(*(parts.decided(plugin, GROUP) for parts, plugin in found))
        assert all(each.kept for each in told)
    assert len(sealed_processes()) <= 4


def batch_of(seed: int, *, episodes: int = 64) -> EpisodeBatch:
    """Random columns; numbers that no short text has."""
    chance = np.random.default_rng(seed)
    lengths = chance.integers(1, 9, episodes)
    return EpisodeBatch(
        groups=np.repeat(np.arange(episodes // 8), 8),
        tasks=np.repeat(np.arange(episodes // 8), 8) * 3,
        rewards=chance.random(episodes),
        lengths=lengths,
        truncated=chance.random(episodes) < 0.2,
        answers=tuple("é\ud800"[: n % 3] for n in range(episodes)),
        parts={"x/y": chance.normal(size=episodes), "z": np.full(episodes, np.nan)},
        logprobs=-chance.random(int(lengths.sum())),
        turns=trial_batch([]).turns,
    )


def test_what_an_advantage_knows_arrives_as_it_was_sent() -> None:
    outcome = GroupOutcome(
        task=4,
        rewards=(0.1, 1e-300),
        answers=("a\ud800", ""),
        lengths=(1, 2),
        truncated=(False, True),
        parts={"x": (0.5, 2.0)},
        kept=(True, False),
        variant="hard",
        meta={"level": [1, {"a": None}]},
    )
    sent = Context(2, 9, seed=7, outcomes=[outcome, GroupOutcome(5, (), (), failed="stale")])
    fields = context_fields(replace(sent, metrics=[{"kl": 0.25}]), {"7": "[1, 2.5]"})
    found = context_of(json.loads(json.dumps(fields)))
    assert found == replace(sent, metrics=[{"kl": 0.25}], memory={"7": [1, 2.5]})


@pytest.mark.parametrize("seed", range(3))
async def test_numbers_are_those_of_the_installed_function(
    functions: OwnFunctions, seed: int
) -> None:
    batch, context = batch_of(seed), Context(step=seed, total_steps=9, seed=seed)
    for name, own, options in (
        ("grpo", "same:grpo", {"eps": 1e-3}),
        ("per_token", "remembering:per_token", {}),
    ):
        spec = spec_of(advantage={"kind": own, **options})
        parts, plugin = await ready(functions, spec)
        function = registry.find("advantages", name)
        expected = called(function, batch, context, options)
        found = await parts.advantages(plugin, batch, context, {})
        assert found.values.tobytes() == expected.values.tobytes()
        assert (found.weights is None) == (expected.weights is None)
        if found.weights is not None and expected.weights is not None:
            assert found.weights.tobytes() == expected.weights.tobytes()
        assert found.notes == expected.notes
        assert parts.needs(plugin) >= ({"tokens", "turns"} if "token" in name else set())


async def test_filters_choose_as_the_installed_ones(functions: OwnFunctions) -> None:
    for name, options in (("balanced", {"keep": 2}), ("zero_variance", {"tolerance": 0.3})):
        spec = spec_of(filters=[{"kind": f"same:{name}", **options}])
        parts, plugin = await ready(functions, spec)
        for group in (GROUP, group_of(1.0, 1.0), group_of(0.0, 0.0, 0.0, 1.0), group_of(0.3, 0.0)):
            expected = answered(registry.find("filters", name), group, options).kept
            assert (await parts.decided(plugin, group)).kept == expected


async def test_a_memory_that_is_too_large_is_an_error_of_the_job(functions: OwnFunctions) -> None:
    parts, plugin = await ready(functions, spec_of(advantage={"kind": "deeds:remembers"}))
    large = replace(plugin, options={"size": 1000})
    with pytest.raises(InvalidError, match="returned too much besides its arrays"):
        await parts.advantages(large, batch_of(0), Context(0, 9), Memory().texts(plugin.name))
