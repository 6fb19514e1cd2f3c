import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline_harness.leaks import files, leaks, processes

SECRET = b"a-secret-of-this-test-0b7e"


def test_leaks_are_found_as_bytes_and_as_hexadecimal_digits() -> None:
    places = [("log", b"token=" + SECRET), ("page", SECRET.hex().upper().encode()), ("other", b"")]
    assert leaks({"it": SECRET}, places) == ["it in log", "it in page"]


def test_a_secret_too_short_to_search_for_is_refused() -> None:
    with pytest.raises(ValueError, match="it: has 1 bytes"):
        leaks({"it": b"a"}, [])


def test_private_files_may_hold_secrets_and_logs_may_not(tmp_path: Path) -> None:
    for name, mode in (("settings.yaml", 0o600), ("told.json", 0o644), ("a.log", 0o600)):
        (tmp_path / name).write_bytes(SECRET)
        (tmp_path / name).chmod(mode)
    assert leaks({"it": SECRET}, files(tmp_path)) == ["it in a.log", "it in told.json"]


def test_command_lines_and_environments_of_children_are_read() -> None:
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {WAITS!r}, 'told'])"
    environment = {**os.environ, "IT": SECRET.decode()}
    process = subprocess.Popen(
        [sys.executable, "-c", nested.replace("told", SECRET.decode())],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.readline()
    found = leaks({"it": SECRET}, processes([process.pid]))
    process.communicate(b"\n")
    assert [place.split()[2] for place in found] == ["cmdline", "environ"] * 2


WAITS = "import sys; print(flush=True); sys.stdin.readline()"
