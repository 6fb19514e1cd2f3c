"""A child process that runs user code: reads a frame of JSON per chunk, writes one per item."""

from __future__ import annotations

import asyncio
import inspect
import signal
import sys
from collections.abc import Callable
from typing import Any

from paceline.program import importing

with importing():
    from paceline.code.errors import told
    from paceline.code.frames import frame, requests, take_pipes
    from paceline.errors import PacelineError
    from paceline.plugins import RewardInput, declared
    from paceline.plugins.loading import attribute
    from paceline.types import Score
    from paceline_reward.scores import as_score, infra_error, item_from_json, score_to_json

# The parent kills a child that hangs; the alarm ends one whose parent has died.
ALARM_MARGIN_S = 5.0


def main() -> None:
    """Serve until the parent closes the pipe; the arguments are folders to import from."""
    sys.path[:0] = sys.argv[1:]
    source, sink = take_pipes()
    for request in requests(source):
        for reply in serve(request):
            sink.write(frame(reply))
            sink.flush()


def serve(request: dict[str, Any]) -> Any:
    """Yield whether the function can be imported, then a score per item.

    Whether the job may name it has been decided by the worker, in `paceline_reward.parts`.
    """
    _alarm(request["load_s"])
    try:
        function = attribute(request["target"])
        if load := declared(function).load:
            load(**request["options"])
    except PacelineError as error:
        _alarm(0.0)
        yield {"failed": error.message}
        return
    except Exception as error:  # the supervisor boundary of an import
        _alarm(0.0)
        yield {"failed": f"importing {request['target']!r}: {told(error)}"}
        return
    yield {"failed": ""}
    for raw in request["items"]:
        _alarm(request["timeout_s"])
        yield score_to_json(score(function, item_from_json(raw), request["options"]))
    _alarm(0.0)


def score(function: Callable[..., Any], item: RewardInput, options: dict[str, Any]) -> Score:
    """Score an item; whatever the function raises becomes an `infra_error`."""
    try:
        value = function(item, **options)
        if inspect.isawaitable(value):
            value = asyncio.run(_finish(value))
        return as_score(value)
    except (Exception, SystemExit) as error:  # the supervisor boundary of one score
        return infra_error(told(error))


async def _finish(value: Any) -> Any:
    return await value


def _alarm(after_s: float) -> None:
    signal.setitimer(signal.ITIMER_REAL, after_s + ALARM_MARGIN_S if after_s else 0.0)


if __name__ == "__main__":
    main()
