"""Tracker process: `python -m paceline_tracking.host`, which serves requests over pipes."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from paceline.platform.program import importing

with importing():
    from paceline.isolation.child import ServedCall, serve
    from paceline.platform.parent import end_with_parent
    from paceline.plugins import Tracker, registry
    from paceline_tracking.messages import point_from, run_from
    from paceline_tracking.secrets import without_secrets

MOST_ERROR_CHARS = 500
VERBS = ("open", "write", "finish", "close")


def main() -> None:
    """Serve until the parent closes the pipe."""
    end_with_parent()
    host = Host()
    serve({verb: partial(_answer, host, verb) for verb in VERBS}, words=words)
    # Skip exit handlers: they may wait for a server.
    os._exit(0)


def words(error: BaseException) -> str:
    """What the history shows of an error."""
    # Redact before truncating, which may leave half of a secret.
    return without_secrets(f"{type(error).__name__}: {error}")[:MOST_ERROR_CHARS]


def _answer(host: Host, verb: str, call: ServedCall) -> dict[str, Any]:
    return host.do(verb, call.fields["given"])


class Host:
    """Passes requests to the tracker."""

    def __init__(self) -> None:
        self._tracker: Tracker | None = None

    def do(self, verb: str, given: Any) -> dict[str, Any]:
        """Serve one request of `VERBS`; raises what the tracker raises."""
        if verb == "open":
            self._tracker = registry.find("trackers", given["kind"])(
                run_from(given["run"]), **given["options"]
            )
        tracker = self._tracker
        if tracker is None:
            raise RuntimeError(f"{verb} before open")
        if verb == "write":
            tracker.write([point_from(raw) for raw in given])
        elif verb == "finish":
            tracker.finish(given["state"], given["summary"])
        elif verb == "close":
            tracker.close()
        # Everybody who may see the job sees its address.
        return {"url": without_secrets(tracker.url), "rows": tracker.rows}


if __name__ == "__main__":
    main()
