from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import ServiceSettings, load_settings, parse_arguments
from paceline.errors import ConfigError

BASE = {
    "kind": "gateway",
    "worker_id": "gateway-0",
    "port": 8400,
    "logs": {"level": "INFO", "backups": 5},
    "options": {"http_port": 8300, "kubernetes": {"release": "demo"}},
}


def written(folder: Path, name: str, content: Any) -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return written(tmp_path, "settings.yaml", BASE)


def test_a_single_file_is_loaded_unchanged(base: Path) -> None:
    settings = load_settings(base)
    assert settings.port == 8400
    assert settings.options == BASE["options"]


def test_later_files_are_merged_section_by_section(base: Path, tmp_path: Path) -> None:
    token = written(tmp_path, "token.yaml", {"token": "secret", "logs": {"level": "DEBUG"}})
    empty = written(tmp_path, "empty.yaml", "# nothing\n")
    settings = load_settings(base, token, empty)
    assert settings.token == "secret"
    assert (settings.logs.level, settings.logs.backups) == ("DEBUG", 5)


def test_overrides_win_and_reach_into_sections(base: Path, tmp_path: Path) -> None:
    above = written(tmp_path, "above.yaml", {"port": 1, "options": {"http_port": 2}})
    overrides = ["port=3", "options.http_port=4", "options.kubernetes.identity=pod-1"]
    settings = load_settings(base, above, overrides=overrides)
    assert settings.port == 3
    kubernetes = {"release": "demo", "identity": "pod-1"}
    assert settings.options == {"http_port": 4, "kubernetes": kubernetes}


def test_a_section_may_be_replaced_or_set_to_null(base: Path) -> None:
    overrides = ["logs={level: DEBUG}", "supervisor={path: beat}", "supervisor=null"]
    settings = load_settings(base, overrides=overrides)
    assert (settings.logs.level, settings.logs.backups) == ("DEBUG", 5)
    assert settings.supervisor is None


@given(text=st.text(min_size=1).filter(lambda text: "\x00" not in text))
def test_text_overrides_are_literal(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = written(tmp_path_factory.getbasetemp(), "text.yaml", BASE)
    overrides = [f"worker_id={text}", f"advertise={text}"]
    settings = load_settings(path, overrides=overrides)
    assert (settings.worker_id, settings.advertise) == (text, text)


def test_a_numeric_looking_name_stays_text(base: Path) -> None:
    settings = load_settings(base, overrides=["job_id=0123", "advertise=[fd00::1]:8400"])
    assert (settings.job_id, settings.advertise) == ("0123", "[fd00::1]:8400")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"colour": "red"}, "above.yaml: colour: unknown field; allowed here: advertise,"),
        ({"logs": {"backups": "x"}}, "above.yaml: logs.backups: Input should be a valid integer"),
        ({"port": 70000}, "above.yaml: port: Input should be less than or equal to 65535"),
        ("- a\n- b", "above.yaml: is a list; expected a mapping of fields"),
        ("a: [", "above.yaml: not YAML at line 2, column 1"),
    ],
)
def test_errors_name_the_file(base: Path, tmp_path: Path, content: Any, says: str) -> None:
    above = written(tmp_path, "above.yaml", content)
    with pytest.raises(ConfigError) as caught:
        load_settings(base, above)
    assert says in str(caught.value)
    assert "settings.yaml" not in str(caught.value)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("port", "--set port: is not FIELD=VALUE"),
        ("=3", "--set : is not FIELD=VALUE"),
        ("logs..level=3", "--set logs..level: is not FIELD=VALUE"),
        ("port=many", "--set port: port: Input should be a valid integer"),
        ("kind.of=gateway", "--set kind.of: kind: Input should be"),
        ("options=3", "--set options: options: Input should be a mapping (got 3)"),
        ("logs=[", "--set logs: not YAML at line 2"),
    ],
)
def test_errors_name_the_override(base: Path, override: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(base, overrides=[override])
    assert says in str(caught.value)


def test_a_missing_field_and_a_missing_file_are_named(tmp_path: Path) -> None:
    path = written(tmp_path, "settings.yaml", {"kind": "gateway"})
    with pytest.raises(ConfigError, match=r"settings\.yaml: worker_id: is missing"):
        load_settings(path)
    with pytest.raises(ConfigError, match=r"none\.yaml: no such file"):
        load_settings(path, tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match=r"Is a directory"):
        load_settings(tmp_path)


@pytest.mark.parametrize(
    "content", ["token: 98765432", "token: *98765432", "store_url: [redis://:98765432@host]"]
)
def test_errors_do_not_quote_secrets(base: Path, tmp_path: Path, content: str) -> None:
    above = written(tmp_path, "above.yaml", content)
    with pytest.raises(ConfigError) as caught:
        load_settings(base, above)
    assert "98765432" not in str(caught.value)
    assert "above.yaml" in str(caught.value)


def test_settings_do_not_print_secrets() -> None:
    settings = ServiceSettings.model_validate(
        {**BASE, "token": "98765432", "store_url": "redis://:98765432@host"}
    )
    assert "98765432" not in repr(settings)


def test_the_command_line(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    above = written(tmp_path, "above.yaml", {"site": "lab"})
    arguments = [str(base), "--set", "port=1", str(above), "--set=worker_id=a=b"]
    settings = parse_arguments(arguments, program="demo")
    assert (settings.port, settings.site, settings.worker_id) == (1, "lab", "a=b")
    with pytest.raises(SystemExit) as caught:
        parse_arguments([], program="demo")
    assert caught.value.code == 2
    assert "usage: demo [-h] [--set FIELD=VALUE] FILE [FILE ...]" in capsys.readouterr().err
