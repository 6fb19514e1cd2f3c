"""Runs the filters and advantages of a job, in a process of that job, one call at a time."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any

from paceline.code.errors import told
from paceline.code.frames import MAX_FRAME_BYTES, frame, take_pipes
from paceline.config.options import refused_options
from paceline.errors import InvalidError
from paceline.plugins import declared
from paceline.plugins.loading import attribute

if TYPE_CHECKING:  # numpy may be one that the job requires: it is not there before its folders are
    from paceline.code.arrays import ArrayMessage

_LESS_URGENT = 10  # than the service, whose machine it shares


def main() -> None:
    """Serve requests on standard input."""
    with suppress(OSError):
        os.nice(_LESS_URGENT)
    tempfile.tempdir = os.environ.get("TMPDIR", "/tmp")
    source, sink = take_pipes()
    from paceline.code.arrays import array_requests

    for request in array_requests(source):
        sink.write(_answer(request))
        sink.flush()


def _answer(request: ArrayMessage) -> bytes:
    """The answer to a request; whatever the code raises is an answer too."""
    try:
        data = _called(request)
    except BaseException as error:  # the boundary of the job's code: each call has an answer
        return frame({"error": told(error)})
    if int.from_bytes(data[:4]) > MAX_FRAME_BYTES:
        return frame({"error": "returned too much besides its arrays"})
    return data


def _called(request: ArrayMessage) -> bytes:
    from paceline.code.arrays import array_frame
    from paceline.code.ledger_messages import (
        advantages_message,
        batch_of,
        context_of,
        decision_fields,
        group_of,
    )

    fields = request.fields
    if fields["op"] == "describe":
        return frame(_described(fields))
    function = _found(fields["target"])
    if fields["op"] == "filter":
        group = group_of(fields["group"])
        answer = function(group, **fields["options"])
        return frame(decision_fields(answer, len(group.rewards)))
    batch = batch_of(fields["answers"], request.arrays)
    answer = function(batch, context_of(fields["context"]), **fields["options"])
    return array_frame(*advantages_message(answer))


def _described(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What is wrong with the options of a plug-in, and what it needs of its job."""
    field, kind, target, options = (fields[n] for n in ("field", "kind", "target", "options"))
    try:
        function = _found(target)
    except InvalidError as error:
        return {"wrong": [f"{field}.kind: {error.message}"], "needs": []}
    if wrong := list(refused_options(field, kind, target, options, source=function)):
        return {"wrong": wrong, "needs": []}
    return {"wrong": [], "needs": list(declared(function).needs_with(options))}


@cache
def _found(target: str) -> Any:
    found = attribute(target)
    if not callable(found):
        raise InvalidError(f"{target!r} is a {type(found).__name__}, no function")
    return found
