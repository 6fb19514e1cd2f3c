"""Which calls a proxy of the environment carries."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.front.client.client import Client
from paceline.platform.proxies import environment_proxy, is_loopback, proxy_note, without_loopback

NAMES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
HOSTS = st.from_regex(r"\.?[a-z0-9]{1,6}(\.[a-z0-9]{1,6}){0,2}", fullmatch=True)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but what a test sets."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST.", "a.localhost", "127.0.0.1", "127.8.9.1", "::1", "[::1]", "0.0.0.0"],
)
def test_this_machine_is_known_by_its_names(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host", ["", "localhost.example", "10.0.0.1", "2001:db8::1", "127.0.0.1.x"]
)
def test_other_machines_are_others(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"])
@pytest.mark.parametrize("value", ["http://p:3128", "p:3128"])
def test_outside_calls_go_where_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    assert environment_proxy("http://gateway.example:8300") == "http://p:3128"
    assert environment_proxy("http://127.0.0.1:8300") is None
    assert (environment_proxy("https://gateway.example") is None) is ("http" in name.lower())
    monkeypatch.setenv("no_proxy", "localhost,.example")
    assert environment_proxy("http://gateway.example:8300") is None


def test_a_failed_call_names_its_proxy_without_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://me:secret@p:3128")
    said = proxy_note("https://gateway.example/v1")
    assert "p:3128" in said
    assert "no_proxy=gateway.example" in said
    assert "secret" not in said
    assert proxy_note("http://gateway.example") == ""


@pytest.mark.parametrize("value", ["socks9://p:1", "gopher://p:1"])
def test_a_proxy_that_cannot_be_used_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("all_proxy", value)
    with pytest.raises(ConfigError, match=r"all_proxy.*gateway\.example.*no_proxy"):
        Client("http://gateway.example")
    Client("http://127.0.0.1:8300").close()  # no proxy carries it


@given(st.lists(HOSTS), st.lists(HOSTS))
def test_programs_of_others_leave_out_this_machine_too(lower: list[str], upper: list[str]) -> None:
    before = {"no_proxy": ",".join(lower), "NO_PROXY": ", ".join(upper), "PATH": "/bin"}
    after = without_loopback(before)
    assert set(after) == {"no_proxy", "NO_PROXY"}
    assert len(set(after.values())) == 1
    assert set(after["no_proxy"].split(",")) == {*lower, *upper, "localhost", "127.0.0.1", "::1"}
    assert without_loopback(after) == after


@pytest.mark.parametrize("listed", ["*", "a.example, *"])
def test_no_proxy_for_all_stays_so(listed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    after = without_loopback({"NO_PROXY": listed})
    assert after == {"no_proxy": "*", "NO_PROXY": "*"}
    monkeypatch.setenv("http_proxy", "http://p:1")
    monkeypatch.setenv("no_proxy", after["no_proxy"])
    assert environment_proxy("http://a.example") is None


def test_the_library_of_others_reads_it_so() -> None:
    code = "from urllib.request import proxy_bypass as p; print(p('127.0.0.1:80'), p('a.example'))"
    variables = {"http_proxy": "http://p:1", **without_loopback({"NO_PROXY": "b.example"})}
    command = [sys.executable, "-c", code]
    said = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["True", "False"]
