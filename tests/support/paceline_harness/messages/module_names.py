"""Jobs that name modules, in every place of a job file and in every spelling."""

from __future__ import annotations

import json
from typing import Any

MODULE = "import pathlib\npathlib.Path(__file__).with_name('deed').touch()\n"
EVIL = "strangers:run"
LISTED = "paceline_listed.scores:score"
DICT_CONFIG = {"version": 1, "formatters": {"x": {"()": "strangers.run"}}}
SIBLINGS = [
    "paceline_listed.scores:other",
    "paceline_listed.scores:score.__globals__",
    "paceline_listed.scores:score:run",
    "paceline_listed.scores:__dict__",
    "paceline_listed.scores:__getattr__",
    "paceline_listed:scores",
    "paceline_listed.scores.score:run",
    "paceline_listed.scores : score",
    "paceline_listed.scores:score ",
    "paceline_listed.scores:score\u00a0",
    "paceline_listed.scores:score\ufeff",
    "paceline_listed.scores:\uff53core",  # a full-width letter
    "paceline_li\u017fted.scores:score",  # a long s, which NFKC makes an s
    "paceline_listed.scores:sc\u043ere",  # a Cyrillic letter
    "paceline_listed\u2024scores:score",  # a one dot leader
    "paceline_listed.scores\ua789score",  # a letter that looks like a colon
    "PACELINE_LISTED.scores:score",
    "paceline_listed/scores:score",
    "paceline_listed.scores:score\r\nexact",
    f"{LISTED},{EVIL}",
    f"{EVIL}#{LISTED}",
]


def rewarded(*parts: Any) -> dict[str, Any]:
    """A job's section of rewards."""
    return {"reward": list(parts)}


def objective(**slots: Any) -> dict[str, Any]:
    """A job's section of the trainer."""
    return {"trainer": {"objective": slots}}


def changes() -> dict[str, dict[str, Any]]:
    """Sections of a job, by what they try."""
    named = {f"sibling {name!r}": rewarded(name) for name in SIBLINGS}
    named |= {f"slot {name!r}": objective(surrogate=name) for name in SIBLINGS}
    functions: list[Any] = [[EVIL], {EVIL: 1}, 1, None, "", ":", f"{LISTED} ", f"exact:{EVIL}"]
    named |= {
        f"function {each!r}": rewarded({"kind": "python", "function": each}) for each in functions
    }
    experience = {
        kind: {"experience": {kind: value}}
        for kind, value in {
            "sampler": EVIL,
            "allocator": EVIL,
            "replay": {"kind": EVIL},
            "filters": [EVIL],
            "advantage": EVIL,
            "advantage_shaping": [EVIL],
        }.items()
    }
    slots: dict[str, Any] = {
        "proximal": EVIL,
        "aggregation": EVIL,
        "shaping": [EVIL],
        "corrections": [EVIL],
        "regularisers": [EVIL],
    }
    return {
        **named,
        **experience,
        **{kind: objective(**{kind: value}) for kind, value in slots.items()},
        **_in_parts(),
        **_elsewhere(),
    }


def _in_parts() -> dict[str, dict[str, Any]]:
    """In options and shapes of parts of a reward."""
    python = {"kind": "python", "function": EVIL}
    return {
        "uvicorn": rewarded({"kind": "uvicorn:run", "app": "strangers:run", "factory": True}),
        "dictConfig": rewarded({"kind": "logging.config:dictConfig", "config": DICT_CONFIG}),
        "after a good part": rewarded("exact", {**python, "name": "b", "after": ["exact"]}),
        "a part named as a plug-in": rewarded({"kind": EVIL, "name": "exact"}),
        "weightless": rewarded("exact", {"kind": EVIL, "weight": 0.0}),
        "a target": rewarded({"kind": "exact", "target": EVIL}),
        "a load": rewarded({"kind": "math", "load": EVIL}),
        "inline": rewarded({"kind": EVIL, "inline": True}),
        "an option of the judge": rewarded({"kind": "judge", "model": "m", "function": EVIL}),
        "two functions": rewarded(python, {"kind": "python", "function": LISTED, "name": "b"}),
    }


def _elsewhere() -> dict[str, dict[str, Any]]:
    """In all other sections."""
    arithmetic = {"environment": "arithmetic"}
    rows = {"sources": [{"environment": EVIL}]}
    return {
        "hook": {"trainer": {"hooks": [EVIL]}},
        "hook after hook": {"trainer": {"hooks": ["vcpo_step", {"kind": EVIL}]}},
        "environment": {"tasks": {"environment": "strangers:ENVIRONMENT"}},
        "listed environment": {"tasks": {"environment": LISTED}},
        "source": {"tasks": {**arithmetic, "source": {"kind": EVIL}}},
        "source in a mixture": {"tasks": {"environment": "dataset", "options": rows}},
        "source of an evaluation": {
            "tasks": {**arithmetic, "source": {"kind": "dataset", **rows}},
            "evals": {"a": {"source": {"kind": EVIL}}},
        },
        "transform": {"tasks": {**arithmetic, "transform": EVIL}},
        "evaluation": {"kind": "eval", **rewarded(EVIL)},
        "topology": {"sampling": {"topology": EVIL}},
        "engine": {"rollout": {"engine": EVIL}},
        "options of an engine": {
            "rollout": {"engine": {"kind": "sglang", "python": "strangers", "module": "strangers"}}
        },
        "arguments of an engine": {
            "rollout": {"engine": {"kind": "sglang", "args": ["--model-impl=strangers"]}}
        },
        "device": {"rollout": {"engine": {"kind": "sglang", "device": "cpu --x=strangers.run"}}},
        "tracker": {"tracking": [EVIL]},
        "settings of a tracker": {"tracking": [{"kind": "wandb", "settings": {"x": EVIL}}]},
        "server of a tracker": {"tracking": [{"kind": "mlflow", "tracking_uri": "file:///tmp"}]},
        "recipe": {"recipe": "strangers:METHOD"},
        "recipe by path": {"recipe": ["grpo", "../strangers.yaml"]},
        "recipe by address": {"recipe": "file:///strangers.yaml"},
        "own code by digest": {"code": {"digest": "0" * 64}, **rewarded(EVIL)},
        "older by a field": {"unlisted": [EVIL], **rewarded(EVIL)},
        "older by its record": {"targets": "", **rewarded(EVIL)},
        "older by its site": {
            "experience": {"advantage": {"kind": EVIL, "site": "experience"}},
        },
        "older by its parent": {"fork": {"job": "confidential-0", "unlisted": [EVIL]}},
        "plugins of its own": {"plugins": {"allowed": [EVIL]}, **rewarded(EVIL)},
        "gymnasium": {
            "tasks": {"environment": "gymnasium", "options": {"id": "strangers:FrozenLake-v1"}}
        },
        "verifiers": {
            "tasks": {"environment": "verifiers", "options": {"id": "../strangers", "size": 1}}
        },
        "rows of a secret": {
            "tasks": {
                "environment": "reasoning_gym",
                "options": {"dataset": "spell_backward", "data_file": __file__},
            }
        },
        "format": {
            "tasks": {"environment": "arithmetic", "options": {"template": "{a.__class__}"}}
        },
    }


def texts(job: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Media types and texts of jobs."""
    found = {what: ("json", json.dumps(job | each)) for what, each in changes().items()}
    plain = json.dumps(job)
    twice = plain.replace('["exact"]', f'["exact"], "reward": ["{EVIL}"]')
    anchors = f"x: &a [{EVIL}]\nreward: *a\n"
    tag = f"reward: [!!python/name:{EVIL.replace(':', '.')} ]\n"
    applied = "reward: !!python/object/apply:strangers.run []\n"
    rest = "".join(f"{key}: {json.dumps(job[key])}\n" for key in job if key != "reward")
    found |= {
        "twice the same key": ("json", twice),
        "escaped": ("json", plain.replace("exact", "\\u0073trangers\\u003arun")),
        "YAML with an anchor": ("yaml", rest + anchors),
        "YAML with a merge": ("yaml", f"x: &a {{reward: [{EVIL!r}]}}\n<<: *a\n{rest}"),
        "YAML with a name of Python": ("yaml", rest + tag),
        "YAML with an object of Python": ("yaml", rest + applied),
    }
    return found
