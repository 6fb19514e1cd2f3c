"""Errors in the API server's wording: an exception that carries a `Status` body."""

from __future__ import annotations

from typing import Any

Object = dict[str, Any]


class StatusError(Exception):
    """A rejected request; `body` is the `Status` object of the response.

    Not a `DoubleError`, since it stands for an error that another program sends.
    """

    def __init__(
        self, code: int, reason: str, message: str, *, details: Object | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.reason = reason
        self.details = details or {}

    @property
    def body(self) -> Object:
        """The `Status` object that clients parse."""
        body: Object = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "details": self.details,
            "code": self.code,
        }
        return {name: value for name, value in body.items() if value or name == "metadata"}


def target(group: str, plural: str) -> str:
    """`deployments.apps`, or `pods` for the core group."""
    return f"{plural}.{group}" if group else plural


def _details(group: str, kind: str, name: str, causes: list[Object] | None = None) -> Object:
    parts = {"name": name, "group": group, "kind": kind, "causes": causes}
    return {key: value for key, value in parts.items() if value}


def not_found(group: str, plural: str, name: str) -> StatusError:
    """404: no object of this name."""
    message = f'{target(group, plural)} "{name}" not found'
    return StatusError(404, "NotFound", message, details=_details(group, plural, name))


def no_such_path() -> StatusError:
    """404: no such resource, version or subresource."""
    return StatusError(404, "NotFound", "the server could not find the requested resource")


def already_exists(group: str, plural: str, name: str) -> StatusError:
    """409: the name is taken."""
    message = f'{target(group, plural)} "{name}" already exists'
    return StatusError(409, "AlreadyExists", message, details=_details(group, plural, name))


STALE = (
    "the object has been modified; please apply your changes to the latest version and try again"
)


def conflict(group: str, plural: str, name: str, why: str = STALE) -> StatusError:
    """409: a concurrent write, or a failed precondition."""
    message = f'Operation cannot be fulfilled on {target(group, plural)} "{name}": {why}'
    return StatusError(409, "Conflict", message, details=_details(group, plural, name))


def cause(reason: str, message: str, field: str) -> Object:
    """One cause of an error, at one field."""
    return {"reason": reason, "message": message, "field": field}


def invalid(group: str, kind: str, name: str, causes: list[Object]) -> StatusError:
    """422: the object is well-formed but invalid, as listed in `causes`."""
    # A text that two causes share appears once.
    lines = list(dict.fromkeys(f"{c['field']}: {c['message']}" for c in causes))
    text = lines[0] if len(lines) == 1 else f"[{', '.join(lines)}]"
    message = f'{target(group, kind)} "{name}" is invalid: {text}'
    return StatusError(422, "Invalid", message, details=_details(group, kind, name, causes))


def bad_request(message: str) -> StatusError:
    """400: the request is malformed."""
    return StatusError(400, "BadRequest", message)


def forbidden(
    group: str, plural: str, name: str, why: str, causes: list[Object] | None = None
) -> StatusError:
    """403: not allowed for this identity, or in this state."""
    named = f'{target(group, plural)} "{name}"' if name else target(group, plural)
    message = f"{named} is forbidden: {why}"
    return StatusError(403, "Forbidden", message, details=_details(group, plural, name, causes))


def unauthorized() -> StatusError:
    """401: the token is unknown."""
    return StatusError(401, "Unauthorized", "Unauthorized")


def expired(message: str) -> StatusError:
    """410: the requested history is gone."""
    return StatusError(410, "Expired", message)


def not_allowed(verb: str) -> StatusError:
    """405: the resource does not support the verb."""
    message = f"the server does not allow this method on the requested resource ({verb})"
    return StatusError(405, "MethodNotAllowed", message)


def internal(message: str) -> StatusError:
    """500: an error of the server, or of a kubelet."""
    return StatusError(500, "InternalError", message)


def unexpected(message: str) -> StatusError:
    """500 without a reason: an error that the server does not map to a status."""
    return StatusError(500, "", message)


def whole(name: str, value: Any) -> int:
    """An integer from a query or body. Raises a 400."""
    try:
        return int(value)
    except (TypeError, ValueError):
        raise bad_request(f"{name}: want a whole number, not {value!r}") from None


def unsupported(media_type: str) -> StatusError:
    """415: this type of body is not supported."""
    message = f"the body of the request was in an unknown format: {media_type}"
    return StatusError(415, "UnsupportedMediaType", message)


def budget_exhausted(budget: str, needed: int, healthy: int) -> StatusError:
    """429: a PodDisruptionBudget does not allow another eviction."""
    message = "Cannot evict pod as it would violate the pod's disruption budget."
    text = f"The disruption budget {budget} needs {needed} healthy pods and has {healthy} currently"
    causes = [{"reason": "DisruptionBudget", "message": text}]
    return StatusError(429, "TooManyRequests", message, details={"causes": causes})
