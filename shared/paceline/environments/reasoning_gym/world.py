"""A single-turn world for any data set of reasoning_gym, scored by the data set itself."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any, Literal

from paceline.environments.reasoning_gym.tasks import make_dataset, unpack
from paceline.errors import InvalidError
from paceline.plugins import Message, Observation, StepResult
from paceline.types import Task

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_OF_TASKS = ("size", "split")


class ReasoningGym:
    """A single turn, scored by the data set.

    `extract` selects the answer: `tag` takes the last <answer>…</answer>, or the whole reply if
    there is none; `tag_only` takes nothing in that case; `whole` ignores tags.
    """

    replayable = True

    def __init__(
        self,
        *,
        dataset: str = "chain_sum",
        system_prompt: str = "",
        extract: Literal["tag", "tag_only", "whole"] = "tag",
        **options: Any,
    ) -> None:
        if extract not in ("tag", "tag_only", "whole"):
            raise InvalidError(f"tasks.options.extract: {extract!r}; allowed: tag, tag_only, whole")
        config = {key: value for key, value in options.items() if key not in _OF_TASKS}
        self._dataset = _scorer(dataset, json.dumps(config, sort_keys=True))
        self._system, self._extract = system_prompt, extract
        self._entry: dict[str, Any] = {}

    async def reset(self, task: Task, seed: int) -> Observation:
        """Show the question, after the system prompt if there is one."""
        del seed
        self._entry = json.loads(task.payload)
        self._entry["metadata"] = unpack(self._entry.get("metadata", {}))
        question = str(self._entry["question"])
        user = Message("user", question)
        if not self._system:
            return Observation(messages=(user,), text=question)
        messages = (Message("system", self._system), user)
        return Observation(messages=messages, text=f"{self._system}\n\n{question}")

    async def step(self, action: str) -> StepResult:
        """Let the data set score the answer."""
        answer = extract_answer(action, self._extract)
        reward = float(self._dataset.score_answer(answer, self._entry))
        return StepResult(Observation(), reward=reward, done=True)

    async def close(self) -> None:
        """Release nothing."""


def extract_answer(reply: str, extract: str) -> str | None:
    """The part of a reply that counts as the answer; None if there is none."""
    if extract == "whole":
        return reply.strip()
    tagged = _ANSWER.findall(reply)
    if tagged:
        return str(tagged[-1]).strip()
    return reply.strip() if extract == "tag" else None


@lru_cache(maxsize=64)
def _scorer(dataset: str, config: str) -> Any:
    """The data set as a scorer, shared by all episodes: scoring needs only its rules."""
    return make_dataset(dataset, seed=0, size=1, config=json.loads(config))
