from __future__ import annotations

import pytest

from kubernetes_double.api.resources.kinds import Kinds
from kubernetes_double.api.world import World


@pytest.fixture(scope="session")
def kinds() -> Kinds:
    return Kinds()


@pytest.fixture
def world(kinds: Kinds) -> World:
    return World(kinds)
