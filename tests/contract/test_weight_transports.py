"""Installed transports of weights fulfil the contract of `paceline.testing.weight_transports`."""

from __future__ import annotations

import pytest

from paceline.plugins import registry
from paceline.testing.weight_fleet import Fleet
from paceline.testing.weight_transports import CHECKS, Check
from paceline.weights.transport import KIND


def test_both_ways_are_installed() -> None:
    assert {"http", "shared_memory", "auto"} <= set(registry.installed(KIND))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", ["http", "shared_memory"])
async def test_transport(name: str, check: Check) -> None:
    async with Fleet(name) as fleet:
        await check(fleet)
