"""Requests whose end a proxy could see elsewhere than we do are refused (RFC 9112).

h11 accepts several forms that the standard lets a server refuse, and that others read otherwise: a
request that one side takes for a part of the body before it is hidden from the checks of a proxy.
"""

from __future__ import annotations

import re
from typing import Any

import h11

_STRAY = re.compile(rb"(?<!\r)\n|\r(?!\n)")
_FOLD = re.compile(rb"\n[ \t]")
_LENGTH = re.compile(rb"\ncontent-length[ \t]*:[ \t]*([^\r]*)", re.IGNORECASE)
_ENCODING = re.compile(rb"\ntransfer-encoding[ \t]*:", re.IGNORECASE)


class StrictConnection(h11.Connection):
    """A server's connection that takes only requests with one possible end."""

    def __init__(self, *, max_head_bytes: int) -> None:
        """`max_head_bytes`: of the first line and the headers of a request."""
        super().__init__(h11.SERVER, max_incomplete_event_size=max_head_bytes)
        self._max_head_bytes = max_head_bytes

    def next_event(self) -> Any:
        """The next event.

        Raises:
            RemoteProtocolError: the request is malformed or ambiguous; close the connection.
        """
        if self.their_state is not h11.IDLE:
            return super().next_event()
        received = self.trailing_data[0]
        event = super().next_event()
        if isinstance(event, h11.Request):
            head = received[: len(received) - len(self.trailing_data[0])]
            if len(head) > self._max_head_bytes:  # h11 counts only what comes in pieces
                raise h11.RemoteProtocolError("the headers are too long", error_status_hint=431)
            if problem := _problem(head, event):
                raise h11.RemoteProtocolError(problem)
        return event


def _problem(head: bytes, request: h11.Request) -> str:
    """Why a request is ambiguous, from its first lines as they came; empty: it is not."""
    lengths, encodings = _LENGTH.findall(head), _ENCODING.findall(head)
    if _STRAY.search(head):
        return "a line does not end with CR LF"
    if _FOLD.search(head):
        return "a header goes on in the next line"
    if len(lengths) > 1 or len(encodings) > 1 or any(b"," in length for length in lengths):
        return "a header that says how long the body is comes more than once"
    if lengths and encodings:
        return "both Content-Length and Transfer-Encoding"
    if encodings and request.http_version != b"1.1":
        return "Transfer-Encoding needs HTTP/1.1"
    return ""
