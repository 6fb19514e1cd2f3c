"""All certificates of an installation, on a fake clock."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from paceline_controller.certificates.config import Issue

START = datetime(2030, 1, 1, tzinfo=UTC)


@pytest.fixture(scope="session")
def make_issue() -> Callable[..., Issue]:
    """Makes an issue for two services; keyword arguments replace fields."""

    def make(**fields: Any) -> Issue:
        content: dict[str, Any] = {
            "namespace": "training",
            "authority": "p-authority",
            "services": {
                "gateway": {"secret": "p-tls-gateway", "names": ["p-gateway", "p-gateway.t.svc"]},
                "experience": {"secret": "p-tls-experience", "names": ["p-experience"]},
            },
        }
        return Issue.model_validate(content | fields)

    return make


@pytest.fixture(scope="session")
def start() -> datetime:
    return START
