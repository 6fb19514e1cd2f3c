import pytest

from paceline.front.local.fork_server import SHARED


@pytest.fixture(autouse=True)
def no_shared_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unit tests do not depend on whether one of a platform has run in the same process before."""
    monkeypatch.delenv(SHARED, raising=False)
