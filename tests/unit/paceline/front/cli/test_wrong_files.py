"""What is wrong with files beside a job file is told by `paceline validate`, before anything runs.

The checks are those of the services, called here as their processes call them; sealed processes are
shared by all cases.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml

from paceline.errors import InvalidError
from paceline.front.cli.check import check, read_job
from paceline.isolation.code.sealed import sandbox_for
from paceline.isolation.code.tokenizers.process import MODULE as TOKENIZER
from paceline.isolation.sandbox import landlock
from paceline.isolation.sandbox.sandbox import Sandbox
from paceline.plugins.allowed import AllowedTargets
from paceline_experience.jobs.submit import here as of_experience
from paceline_gateway.submit import here as of_gateway
from paceline_harness.models.folders import write_readable_model
from paceline_harness.models.hub import serving_hub
from paceline_harness.patience import PATIENCE_S

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(landlock.abi() < 6, reason="needs Landlock with scopes"),
]

GOOD = {
    "task/scoring.py": """
from typing import Annotated
from pydantic import Field

def score(item, *, scale: Annotated[float, Field(gt=0)] = 1.0):
    return scale * len(item.response)

def of_batch(completions, **kwargs):
    return [len(each) for each in completions]

def of_prompts(prompts, completions, answer, **kwargs):
    return [0.0 for _ in completions]

def listed(item):
    return [1.0 if c else 0.0 for c in item.response]

def nothing():
    return 1.0

NUMBER = 3
""",
    "task/control.py": """
from paceline.plugins import Advantages, Drop, Keep

def spread(group, *, least: float = 0.0):
    return Keep()

def five(group):
    return 5

def mean(batch, context):
    return batch.rewards - batch.rewards.mean()

def failing(batch, context):
    return batch.rewards / (1 - 1)

def short(batch, context):
    return batch.rewards[1:]

def odd(batch, context):
    return batch.rewards * float("nan")
""",
    "task/order.py": """
class Order:
    def __init__(self, size, *, seed, epochs, beyond: int = 0):
        self.size, self.beyond, self.drawn = size, beyond, 0
    def next(self):
        self.drawn += 1
        return (self.drawn - 1) % self.size + self.beyond
    def state(self):
        return {"drawn": self.drawn}
    def load(self, state):
        self.drawn = state["drawn"]
""",
    "task/world.py": """
from paceline.plugins import EnvironmentPlugin

class Numbers:
    def __init__(self, *, seed, size=3):
        self.size = size
    def __len__(self):
        return self.size
    def __getitem__(self, position):
        if self.size == 7:
            raise KeyError("seven")
        return {"number": position}

class World:
    def reset(self, task, seed):
        return "1+1="
    def step(self, action):
        return "", 1.0, True

class Half:
    def reset(self, task, seed):
        return "1+1="

GOOD = EnvironmentPlugin(tasks="world:Numbers", world="world:World")
LACKING = EnvironmentPlugin(tasks="world:Numbers", world="lacking:World")
LOST = EnvironmentPlugin(tasks="world:Letters", world="world:World")
MISSPELT = EnvironmentPlugin(tasks="world:Numbers", world="world:Word")
ELSEWHERE = EnvironmentPlugin(tasks="world:Numbers", world="wold:World")
HALF = EnvironmentPlugin(tasks="world:Numbers", world="world:Half")
NONE = {"tasks": Numbers}
""",
    "task/lacking.py": "import only_in_the_image_of_workers",
    "rows/train.jsonl": '{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2=", "answer": "3"}\n',
    "losses/own_losses.py": """
import torch
from pydantic import Field
from paceline.plugins import StrictModel

class Options(StrictModel):
    cap: float = Field(default=2.0, gt=0)

def loss(tokens, options: Options):
    return tokens.logprobs * torch.tensor(options.cap)

def bare(tokens):
    return tokens.logprobs
""",
}
OWN = {"code": {"path": "task"}, "reward": [{"kind": "scoring:score"}]}
ALL = {"environment": "dataset", "options": {"split": "all"}}
ROWS = {"code": None, "data": {"path": "rows"}, "tasks": ALL, "reward": ["numeric"]}
LOSS = "own_losses:loss"


@dataclass(frozen=True)
class Wrong:
    """What is changed in a good job and its files, and what is to be told."""

    told: str
    job: Mapping[str, Any] = field(default_factory=dict[str, Any])
    files: Mapping[str, str] = field(default_factory=dict[str, str])


def reward(kind: str, **options: Any) -> dict[str, Any]:
    return {"reward": [{"kind": kind, **options}]}


def in_ledger(**sections: Any) -> dict[str, Any]:
    return {"experience": sections}


def rows(*lines: str) -> dict[str, str]:
    return {"rows/train.jsonl": "".join(f"{line}\n" for line in lines)}


def loss(kind: str, **options: Any) -> dict[str, Any]:
    return {"trainer": {"objective": {"surrogate": {"kind": kind, **options}}}}


def world(name: str, **options: Any) -> dict[str, Any]:
    return {"tasks": {"environment": f"world:{name}", "options": options}}


CASES = {
    "unknown field": Wrong("nonsense: unknown field", {"nonsense": 1}),
    "wrong type": Wrong("stop.steps: Input should be a valid integer", {"stop": {"steps": "many"}}),
    "no code folder": Wrong("code.path: .*/nowhere: no such folder", {"code": {"path": "nowhere"}}),
    "code is no module": Wrong(
        r"code.path: .*/notes.txt: a file has to be a Python module",
        {"code": {"path": "notes.txt"}},
        {"notes.txt": "hello"},
    ),
    "no module": Wrong(
        r"reward.0.kind: module 'scorin' is not in the job's code; .*scoring.py",
        reward("scorin:score"),
    ),
    "no function": Wrong(
        r"reward.0.kind: .*no attribute 'scor'; functions in it: listed, ", reward("scoring:scor")
    ),
    "no function by option": Wrong(
        r"reward.0.function: .*no attribute 'scor'", reward("python", function="scoring:scor")
    ),
    "no callable": Wrong("reward.0.kind: 'scoring:NUMBER' is a int", reward("scoring:NUMBER")),
    "syntax": Wrong(
        r"SyntaxError: expected ':' \(scoring.py:1\)",
        files={"task/scoring.py": "def score(item)\n    pass\n"},
    ),
    "no package": Wrong(
        r"No module named 'sypmy' \(scoring.py:1\); name its package in",
        files={"task/scoring.py": "import sypmy\n"},
    ),
    "raises": Wrong(
        r"NameError: name 'nam' is not defined \(scoring.py:2\)",
        files={"task/scoring.py": "\nnam.x\n"},
    ),
    "hides a module": Wrong("code: 'random' is a module that Python", files={"task/random.py": ""}),
    "TRL": Wrong(
        r"of_batch takes \(completions, \*\*kwargs\) \(scoring.py:8\).*TRL",
        reward("scoring:of_batch"),
    ),
    "TRL with prompts": Wrong("of_prompts takes .*TRL", reward("scoring:of_prompts")),
    "a list": Wrong(r"listed takes \(item\).* returns a list", reward("scoring:listed")),
    "no argument": Wrong(r"nothing takes \(\) \(scoring.py:17\)", reward("scoring:nothing")),
    "reward option": Wrong(
        "reward.0.scal: unknown option of .*; allowed: scale", reward("scoring:score", scal=1)
    ),
    "reward range": Wrong(
        r"reward.0.scale: .* greater than 0 \(got -1\)", reward("scoring:score", scale=-1)
    ),
    "filter option": Wrong(
        "experience.filters.0.lest: unknown option",
        in_ledger(filters=[{"kind": "control:spread", "lest": 1}]),
    ),
    "filter answer": Wrong(
        "experience.filters.0: control:five: ", in_ledger(filters=["control:five"])
    ),
    "advantage raises": Wrong(
        r"ZeroDivisionError: .* \(control.py:14\)|experience.advantage: control:failing",
        in_ledger(advantage="control:failing"),
    ),
    "advantage length": Wrong(
        "experience.advantage: .*answer of shape", in_ledger(advantage="control:short")
    ),
    "advantage NaN": Wrong(
        "experience.advantage: .*finite numbers", in_ledger(advantage="control:odd")
    ),
    "no advantage": Wrong(
        "experience.advantage.kind: .*'median'; functions", in_ledger(advantage="control:median")
    ),
    "no environment": Wrong("world:NONE is a dict, no EnvironmentPlugin", world("NONE")),
    "no tasks class": Wrong("'world:Letters'", world("LOST")),
    "no world class": Wrong("module 'world' has no attribute 'Word'", world("MISSPELT")),
    "no world module": Wrong("cannot import 'wold:World'", world("ELSEWHERE")),
    "half a world": Wrong("world:Half has no method step", world("HALF")),
    "world option": Wrong(
        r"world:World takes \(\): .*'size'; a world is made with the options of the tasks",
        world("GOOD", size=2),
    ),
    "task option": Wrong(
        "tasks.options: world:GOOD: .*unexpected keyword argument 'siz'", world("GOOD", siz=3)
    ),
    "tasks raise": Wrong(r"KeyError: 'seven' \(world.py:\d+\)", world("GOOD", size=7)),
    "no tasks": Wrong("world:GOOD with options .* has no tasks", world("GOOD", size=0)),
    "requirements": Wrong(
        "requirements.txt:1|requirements.txt.*-r", files={"task/requirements.txt": "-r other.txt\n"}
    ),
    "no data": Wrong("data.path: .*/nowhere: no such file", {**ROWS, "data": {"path": "nowhere"}}),
    "row": Wrong(
        "train.jsonl: line 2: is not JSON",
        ROWS,
        {"rows/train.jsonl": '{"prompt": "a", "answer": "1"}\n{"prompt"\n'},
    ),
    "no prompt": Wrong(
        "train.jsonl: line 1: .*prompt",
        ROWS,
        {"rows/train.jsonl": '{"quest": "a", "answer": "1"}\n'},
    ),
    "no file of data": Wrong(
        "test.jsonl",
        {**ROWS, "tasks": {**ALL, "options": {"sources": [{"path": "test.jsonl"}]}}},
    ),
    "answer": Wrong(
        "row 0 of data: reward.0: the task's answer 'red' is no number",
        ROWS,
        rows('{"prompt": "a", "answer": "red"}'),
    ),
    "sampler option": Wrong(
        "experience.sampler.bogus: unknown option of 'shuffle'",
        in_ledger(sampler={"kind": "shuffle", "bogus": 1}),
    ),
    "own sampler option": Wrong(
        "experience.sampler.bogus: unknown option of 'order:Order'; allowed: beyond",
        in_ledger(sampler={"kind": "order:Order", "bogus": 1}),
    ),
    "own sampler draws no task": Wrong(
        r"experience.sampler: order:Order: ValueError: next\(\) returned .* \(order.py:5\)",
        in_ledger(sampler={"kind": "order:Order", "beyond": 10**6}),
    ),
    "own allocator": Wrong(
        r"experience.allocator.kind: order:Order has no method start, more",
        in_ledger(allocator="order:Order"),
    ),
    "environment option": Wrong(
        "tasks.options.digits", {"tasks": {"environment": "arithmetic", "options": {"digits": -1}}}
    ),
    "loss option": Wrong(
        rf"trainer.objective.surrogate.cop: unknown option of '{LOSS}'; allowed: cap",
        loss(LOSS, cop=1),
    ),
    "loss range": Wrong("trainer.objective.surrogate.cap: .* greater than 0", loss(LOSS, cap=0)),
    "no loss": Wrong(
        "own_losses.py has no 'lost'; functions in it: loss, bare", loss("own_losses:lost")
    ),
    "loss without options": Wrong(
        r"\(own_losses.py:12\) must have a parameter `options`", loss("own_losses:bare")
    ),
    "no module of loss": Wrong("there is no module 'own_loses' here", loss("own_loses:loss")),
    "loss not allowed": Wrong(
        "'other:loss' is not a function that jobs may name here", loss("other:loss")
    ),
    "no model": Wrong("model.path: nowhere is not a folder", {"model": {"path": "nowhere"}}),
    "no model here": Wrong(
        r"model.path: \./a/b is not a folder in /", {"model": {"path": "./a/b"}}
    ),
    "tokenizer": Wrong("model.path: .*tokenizer.json", files={"model/tokenizer.json": "{"}),
    "weights": Wrong("model.path: .*safetensors", files={"model/model.safetensors": "cut"}),
    "positions": Wrong(
        "sampling.max_context: 9000; the model has", {"sampling": {"max_context": 9000}}
    ),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandboxes() -> AsyncIterator[tuple[of_experience.Sandboxes, Sandbox]]:
    made, tokenizers = of_experience.Sandboxes(), sandbox_for(TOKENIZER)
    yield made, tokenizers
    await made.close()
    await tokenizers.close()


@pytest.fixture
def write(tmp_path: Path) -> Callable[[Wrong], Path]:
    """Writes a job file that brings a reward, with its files, but for what is wrong with them."""

    def written(wrong: Wrong) -> Path:
        (tmp_path / "model").mkdir()
        write_readable_model(tmp_path / "model")
        for name, text in {**GOOD, **wrong.files}.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
        job = {
            "name": "own",
            "model": {"path": "model"},
            "tasks": {"environment": "arithmetic"},
            "sampling": {"max_tokens": 4, "max_context": 32},
            **OWN,
            **wrong.job,
        }
        (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
        return tmp_path / "job.yaml"

    return written


async def refused(path: Path, sandboxes: tuple[of_experience.Sandboxes, Sandbox]) -> str:
    """What `paceline validate` tells of a job file; empty: it is good."""
    names = ("loss", "lost", "bare")
    allowed = AllowedTargets.of([*(f"own_losses:{each}" for each in names), "own_loses:loss"])
    try:
        spec = read_job(path, [])
        check(spec, allowed)
        await of_gateway.found_in(spec, allowed, sandboxes[1])
        found = await of_experience.found_in(spec, sandboxes[0])
    except InvalidError as error:
        return error.message
    assert found.unchecked == ()
    return found.message


@pytest.mark.parametrize("name", CASES)
async def test_a_wrong_file_is_told_before_anything_runs(
    name: str,
    write: Callable[[Wrong], Path],
    sandboxes: tuple[of_experience.Sandboxes, Sandbox],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = write(CASES[name])
    monkeypatch.chdir(path.parent)
    monkeypatch.syspath_prepend(path.parent / "losses")
    told = await refused(path, sandboxes)
    assert re.search(CASES[name].told, told), told


GOOD_JOBS = [
    {},
    ROWS,
    world("LACKING"),
    {**world("GOOD"), "experience": {"filters": ["control:spread"], "advantage": "control:mean"}},
    loss(LOSS, cap=1.5),
]


@pytest.mark.parametrize("job", GOOD_JOBS)
async def test_a_good_job_is_accepted(
    job: dict[str, Any],
    write: Callable[[Wrong], Path],
    sandboxes: tuple[of_experience.Sandboxes, Sandbox],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = write(Wrong("", job))
    monkeypatch.chdir(path.parent)
    monkeypatch.syspath_prepend(path.parent / "losses")
    assert await refused(path, sandboxes) == ""


def validated(path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """The command, run elsewhere than in the folder of the job file."""
    command = [sys.executable, "-m", "paceline.front.cli", "validate", str(path)]
    return subprocess.run(
        command,
        cwd="/",
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


async def test_the_command_runs_these_checks(write: Callable[[Wrong], Path]) -> None:
    done = validated(write(CASES["TRL"]))
    assert (done.returncode, done.stdout) == (2, "")
    assert "as rewards of TRL do" in done.stderr


async def test_the_hub_is_asked_for_what_is_no_folder(write: Callable[[Wrong], Path]) -> None:
    path = write(Wrong("", {"model": {"path": "models/mine"}}))
    with serving_hub() as hub:
        refused = validated(path, HF_ENDPOINT=hub.url)
        hub.repo("models/mine").push({"config.json": b"{}"})
        assert validated(path, HF_ENDPOINT=hub.url).returncode == 0
        assert not hub.downloads("config.json")
    assert refused.returncode == 2
    assert "model.path: models/mine is neither a folder" in refused.stderr
    unknown = validated(path, HF_ENDPOINT=hub.url)  # nobody answers there any more
    assert unknown.returncode == 0
    assert "not checked here: model.path: models/mine is no folder" in unknown.stderr
