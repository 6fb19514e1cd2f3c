"""Refused callers are counted one by one, and logged no more often than a disk can bear."""

from __future__ import annotations

import logging

import pytest

from paceline.enums import WorkerKind
from paceline.platform.transport.rpc_authorization import LOG_INTERVAL_S, RefusedCallers


def test_refusals_are_logged_once_in_an_interval_with_their_number(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 100.0
    refusals = RefusedCallers(None, clock=lambda: now)
    with caplog.at_level(logging.WARNING):
        for _ in range(1000):
            refusals.add("/paceline.v1.Experience/Lease", {WorkerKind.REWARD})
        assert len(caplog.records) == 1
        now += LOG_INTERVAL_S
        refusals.add("/paceline.v1.Experience/Lease", {WorkerKind.REWARD})
    assert len(caplog.records) == 2
    assert "1000" in str(vars(caplog.records[1]))
