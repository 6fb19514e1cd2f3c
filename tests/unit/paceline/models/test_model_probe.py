"""A process that computes a user's model reaches nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.isolation.sandbox import landlock

pytestmark = pytest.mark.skipif(landlock.abi() < 6, reason="needs Landlock with scopes")

ATTACKS = """
import os, socket
from paceline.errors import InvalidError
from paceline.models.model_probe import answer

class Config:
    num_hidden_layers, vocab_size = 1, 8
    def get_text_config(self):
        return self

def fails(attack, *arguments):
    try:
        attack(*arguments)
    except OSError:
        return True
    return False

def read(folder):
    assert (folder / "config.json").read_text() == "{}"
    return Config()

def check(config):
    print("printed by a model")
    if config.vocab_size:
        raise InvalidError(str([
            fails(open, "/etc/passwd"), fails(open, "/tmp/written", "w"), fails(os.fork),
            fails(socket.socket), fails(os.kill, os.getppid(), 0),
        ]))

answer(read, check)
"""


def test_code_that_computes_a_model_is_sealed_and_its_answer_is_the_last_line(
    tmp_path: Path,
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    (tmp_path / "attacks.py").write_text(ATTACKS)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "attacks", str(tmp_path / "model")],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert json.loads(done.stdout.splitlines()[-1]) == {"wrong": str([True] * 5)}
