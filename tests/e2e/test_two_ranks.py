"""Two ranks of a trainer against the real ledger."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from paceline_harness.patience import PATIENCE_S
from paceline_harness.processes import place_of


@pytest.fixture(scope="module", autouse=True)
def _computing() -> Iterator[None]:
    """What the platform of this module hands on to its trainers."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in place_of(2).items():
            patch.setenv(name, value)
        yield


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_ranks_train_a_job(platform: Any, tiny_job: Callable[..., Any]) -> None:
    job = tiny_job(name="ranks", stop={"steps": 20}, trainer={"world_size": 2})
    with platform.client() as client:
        job_id = client.submit(job).status.job_id
        status = client.wait(job_id, timeout_s=PATIENCE_S).status
        assert status.state == "succeeded", f"{status.reason}\n{platform.logs()}"
        assert status.incarnation == 1, platform.logs()
        assert client.verify(job_id).ok
        assert status.summary["steps"] == 20
