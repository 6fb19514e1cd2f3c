"""The model of a job behind an outside endpoint: requests, bounded and repeated."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from paceline.config import JobSpec
from paceline.enums import Phase
from paceline.errors import UnavailableError
from paceline.platform.fair_queue import QueueOwner
from paceline.platform.transport.endpoints import RefusedError, WorkerEndpoints
from paceline.types import SamplingParams
from paceline_environment.outside.replies import ChatTurn, NoCompletionError, filtered, read_turn
from paceline_environment.stages import JobStages

_ATTEMPTS = 3  # of a request whose answers are malformed
_MAX_SEED = (1 << 31) - 1  # some servers take no more


class OutsideModel:
    """The model of a job outside; a worker has at most `concurrency` open requests to it."""

    def __init__(self, endpoints: WorkerEndpoints, job_id: str, spec: JobSpec) -> None:
        assert spec.model.endpoint is not None
        self.max_context = spec.sampling.max_context
        self._endpoints, self._endpoint = endpoints, spec.model.endpoint
        self._model = spec.model.path
        self._owner = QueueOwner(spec.tenant, job_id)
        self._room = asyncio.Semaphore(self._endpoint.concurrency)

    def request(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        sampling: SamplingParams,
    ) -> dict[str, Any]:
        """The body of a request: what the job asks for, changed by `model.endpoint.request`."""
        body: dict[str, Any] = {
            "model": self._model,
            "messages": list(messages),
            "temperature": sampling.temperature,
            "max_tokens": sampling.max_tokens,
            "seed": sampling.seed & _MAX_SEED,
        }
        if tools:
            body["tools"] = list(tools)
        if sampling.top_p != 1.0:
            body["top_p"] = sampling.top_p
        if sampling.top_k:
            body["top_k"] = sampling.top_k
        if sampling.min_p:
            body["min_p"] = sampling.min_p
        if sampling.stop_strings:
            body["stop"] = list(sampling.stop_strings)
        changed = body | self._endpoint.request
        return {name: value for name, value in changed.items() if value is not None}

    async def ask(
        self, body: Mapping[str, Any], stages: JobStages, *, begun: Callable[[], None]
    ) -> ChatTurn:
        """The turn that the server answers with; `begun` is called when it is asked.

        Raises:
            RefusedError: it refuses the request for good.
            InvalidError: this worker knows no such endpoint.
            UnavailableError: it has not answered in time, or not in the form of a completion.
        """
        with stages.wait(Phase.ROOM):
            await self._room.acquire()
        try:
            with stages.wait(Phase.GENERATE):
                begun()
                return await self._post(body, stages)
        finally:
            self._room.release()

    async def _post(self, body: Mapping[str, Any], stages: JobStages) -> ChatTurn:
        @contextmanager
        def pausing(problem: str) -> Generator[None]:
            stages.refused = problem
            with stages.wait(Phase.REPEAT):
                yield

        left_s, problem = self._endpoint.timeout_s, ""
        for _ in range(_ATTEMPTS):
            if left_s <= 0:
                break
            try:
                answer, took_s = await self._endpoints.post(
                    self._owner,
                    self._endpoint.name,
                    "/chat/completions",
                    body,
                    most=self._endpoint.concurrency,
                    fresh=True,
                    budget_s=left_s,
                    pausing=pausing,
                )
            except RefusedError as error:
                if (turn := filtered(error)) is not None:
                    return turn
                raise
            try:
                return read_turn(answer)
            except NoCompletionError as error:
                problem = error.message
            left_s -= took_s
        raise UnavailableError(
            f"endpoint {self._endpoint.name!r}: its answer is no chat completion: {problem}"
        )
