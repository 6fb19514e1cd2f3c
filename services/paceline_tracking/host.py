"""Tracker process: `python -m paceline_tracking.host`, which serves requests over pipes."""

from __future__ import annotations

import json
import os
from typing import Any

from paceline.program import importing

with importing():
    from paceline.parent import end_with_parent
    from paceline.plugins import Tracker, registry
    from paceline.server.child import take_pipes
    from paceline_tracking.messages import point_from, run_from
    from paceline_tracking.secrets import without_secrets

MOST_ERROR_CHARS = 500


def main() -> None:
    """Serve until the parent closes the pipe."""
    source, sink = take_pipes()
    end_with_parent()
    host = Host()
    for line in source:
        sink.write(json.dumps(host.serve(json.loads(line))) + "\n")
        sink.flush()
    # Skip exit handlers: they may wait for a server.
    os._exit(0)


class Host:
    """Passes requests to the tracker; its exceptions become error replies."""

    def __init__(self) -> None:
        self._tracker: Tracker | None = None

    def serve(self, request: dict[str, Any]) -> dict[str, Any]:
        """Serve one request: `open`, `write`, `finish` or `close`."""
        (verb,) = request
        try:
            return self._do(verb, request[verb])
        except (Exception, SystemExit) as error:  # the supervisor boundary of one request
            # Redact before truncating, which may leave half of a secret.
            text = without_secrets(f"{type(error).__name__}: {error}")
            return {"error": text[:MOST_ERROR_CHARS]}

    def _do(self, verb: str, given: Any) -> dict[str, Any]:
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
