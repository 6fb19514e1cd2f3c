from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.config.load import load
from paceline.errors import ConfigError
from paceline_controller.certificates.config import Issue
from paceline_controller.certificates.start import main


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"authority": "p-tls-gateway"}, "'p-tls-gateway' is also that of authority"),
        ({"authority_days": 100}, "at least twice as long"),
        ({"spread_s": 1e7}, "at most 1.296e"),
        ({"days": 0}, "days: "),
        ({"services": {}}, "services: "),
        ({"services": {"a": {"secret": "b", "names": ["under_score"]}}}, "services.a.names.0: "),
        ({"services": {"a": {"secret": "Upper"}}}, "services.a.secret: "),
        ({"authority_key": "x"}, "authority_key: unknown field; allowed here: "),
    ],
)
def test_a_wrong_file_is_explained(
    make_issue: Callable[..., Issue], tmp_path: Path, fields: dict[str, Any], words: str
) -> None:
    path = tmp_path / "issue.yaml"
    path.write_text(yaml.safe_dump(make_issue().model_dump(mode="json") | fields))
    with pytest.raises(ConfigError) as raised:
        load(Issue, path)
    assert words in str(raised.value)


def test_fields_are_laid_over_the_file(make_issue: Callable[..., Issue], tmp_path: Path) -> None:
    path = tmp_path / "issue.yaml"
    path.write_text(yaml.safe_dump(make_issue().model_dump(mode="json")))
    found = load(
        Issue, path, overrides=["namespace=other", "services.gateway.names=[a, b.c]", "days=30"]
    )
    assert found.namespace == "other"
    assert found.names("gateway") == ("gateway.paceline.internal", "paceline.internal", "a", "b.c")
    assert found.spread == timedelta(days=1)
    assert load(Issue, path, overrides=["days=0.6"]).spread == timedelta(days=0.1)


def test_outside_a_cluster_the_error_names_what_is_missing(
    make_issue: Callable[..., Issue], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "issue.yaml"
    path.write_text(yaml.safe_dump(make_issue().model_dump(mode="json")))
    missing = tmp_path / "nowhere"
    assert main([str(path), "--set", f"kubeconfig={missing}"]) == 2
    assert str(missing) in capsys.readouterr().err
    assert main([str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml" in capsys.readouterr().err
