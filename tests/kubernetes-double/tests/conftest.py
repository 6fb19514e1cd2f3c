"""Settings of all tests of the double."""

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from kubernetes_double.patience import PATIENCE_S

# The speed of generating examples depends on the machine's load, not on the code under test.
PATIENT = settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
settings.register_profile("double", PATIENT, max_examples=50)
settings.register_profile("extended", PATIENT, max_examples=1000)
settings.load_profile("double")
# Servers of the tests are on this machine, whatever proxy leads to others.
for name in ("NO_PROXY", "no_proxy"):
    os.environ[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1", "localhost"]))


@pytest.fixture(scope="session")
def until() -> Callable[..., Any]:
    """Waits for the first true result of a check, and returns it; fails after `seconds`."""

    def wait(check: Callable[[], Any], seconds: float = PATIENCE_S) -> Any:
        end = time.monotonic() + seconds
        while not (result := check()):
            assert time.monotonic() < end, "the condition did not become true"
            time.sleep(0.05)
        return result

    return wait
