"""Errors of the cluster's own Python interface; those that clients receive are in `api`."""

from __future__ import annotations


class DoubleError(Exception):
    """Base of all errors that a cluster raises deliberately."""


class NotFoundError(DoubleError):
    """No object, container or file has this name."""


class UnavailableError(DoubleError):
    """A part of the cluster does not start, or does not answer."""
