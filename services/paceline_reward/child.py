"""A child process that runs user code: it is called once per chunk, and answers for each item."""

from __future__ import annotations

import asyncio
import inspect
import signal
import sys
from collections.abc import Callable
from typing import Any

from paceline.platform.program import importing

with importing():
    from paceline.errors import InvalidError, PacelineError
    from paceline.isolation.child import ServedCall, raised, serve
    from paceline.plugins import RewardInput, declared
    from paceline.plugins.loading import attribute
    from paceline.types import Score
    from paceline_reward.scores import (
        MAX_JSON_BYTES,
        as_score,
        infra_error,
        item_from_json,
        score_to_json,
    )

# The parent kills a child that hangs; the alarm ends one whose parent has died.
ALARM_MARGIN_S = 5.0


def main() -> None:
    """Serve until the parent closes the pipe; the arguments are folders to import from."""
    sys.path[:0] = sys.argv[1:]
    serve({"score": score_chunk}, most_bytes=MAX_JSON_BYTES)


def score_chunk(call: ServedCall) -> dict[str, Any]:
    """Tell once the function can be imported, then answer with a score per item.

    Whether the job may name it has been decided by the worker, in `paceline_reward.parts`.

    Raises:
        PacelineError: it cannot be.
    """
    options: dict[str, Any] = call.fields["options"]
    function = _loaded(call.fields["target"], options, load_s=call.fields["load_s"])
    call.tell({})
    *items, last = call.fields["items"]
    try:
        for raw in items:
            _alarm(call.fields["timeout_s"])
            call.tell(score_to_json(score(function, item_from_json(raw), options)))
        _alarm(call.fields["timeout_s"])
        return score_to_json(score(function, item_from_json(last), options))
    finally:
        _alarm(0.0)


def _loaded(target: str, options: dict[str, Any], *, load_s: float) -> Callable[..., Any]:
    _alarm(load_s)
    try:
        function = attribute(target)
        if load := declared(function).load:
            load(**options)
    except PacelineError:
        raise
    except Exception as error:  # the supervisor boundary of an import
        raise InvalidError(f"importing {target!r}: {raised(error)}") from None
    finally:
        _alarm(0.0)
    return function


def score(function: Callable[..., Any], item: RewardInput, options: dict[str, Any]) -> Score:
    """Score an item; whatever the function raises becomes an `infra_error`."""
    try:
        value = function(item, **options)
        if inspect.isawaitable(value):
            value = asyncio.run(_finish(value))
        return as_score(value)
    except (Exception, SystemExit) as error:  # the supervisor boundary of one score
        return infra_error(raised(error))


async def _finish(value: Any) -> Any:
    return await value


def _alarm(after_s: float) -> None:
    signal.setitimer(signal.ITIMER_REAL, after_s + ALARM_MARGIN_S if after_s else 0.0)


if __name__ == "__main__":
    main()
