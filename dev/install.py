"""Installs distributions into an environment with uv, or with pip where uv cannot be had.

    python dev/install.py .venv -c constraints.txt -e '.[local]'

Makes the environment if there is none. All after its folder are arguments of `pip install` that uv
takes too, and `--compile`: byte code is written at installation, not at the first import.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Mapping
from pathlib import Path

# uv ignores settings of pip: mirrors, local folders and constraints are passed to it.
UV_NAMES = {
    "find-links": "UV_FIND_LINKS",
    "constraint": "UV_CONSTRAINT",
    "cert": "SSL_CERT_FILE",
}
PYPI = "https://pypi.org/simple"
# With several indexes pip takes the best version of all.
UV_DEFAULTS = {"UV_INDEX_STRATEGY": "unsafe-best-match"}
PIP_SCOPES = ("global.", "install.", ":env:.")


def main(arguments: list[str]) -> int:
    """Install; returns the exit code of the installer."""
    if len(arguments) < 2 or arguments[0].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 2
    folder, *wanted = arguments
    environment = Path(folder)
    if not (environment / "bin" / "python").exists():
        venv.create(environment, with_pip=True)
    compiled = "--compile" in wanted
    wanted = [argument for argument in wanted if argument != "--compile"]
    print(f"{folder}: installing {' '.join(wanted)}", flush=True)
    return (
        0 if _with_uv(environment, wanted, compiled) else _with_pip(environment, wanted, compiled)
    )


def _with_uv(environment: Path, wanted: list[str], compiled: bool) -> bool:
    """Whether uv is available and has installed everything."""
    tool = uv(environment)
    if tool is None:
        return False
    told = pip_settings(environment)
    if "--index-url" in wanted:
        place = wanted.index("--index-url")
        told["index-url"] = wanted[place + 1]
        wanted = [*wanted[:place], *wanted[place + 2 :]]
    settings = UV_DEFAULTS | uv_settings(told) | os.environ
    more = ["--compile-bytecode"] if compiled else []
    command = [tool, "pip", "install", "-q", "--python", environment / "bin" / "python", *more]
    if subprocess.run([*command, *wanted], env=settings, check=False).returncode == 0:
        return True
    print("uv failed, falling back to pip", file=sys.stderr, flush=True)
    return False


def _with_pip(environment: Path, wanted: list[str], compiled: bool) -> int:
    more = [] if compiled else ["--no-compile"]
    command = [environment / "bin" / "python", "-m", "pip", "install", "-q", *more, *wanted]
    return subprocess.run(command, check=False).returncode


def uv(environment: Path) -> str | None:
    """The uv of this machine, or one installed into the environment with pip."""
    own = environment / "bin" / "uv"
    if found := shutil.which("uv"):
        return found
    if not own.exists():
        pip = [environment / "bin" / "python", "-m", "pip", "install", "-q", "uv"]
        subprocess.run(pip, check=False)
    return str(own) if own.exists() else None


def pip_settings(environment: Path) -> dict[str, str]:
    """Settings of pip from files and variables, by name; the more specific one wins."""
    command = [environment / "bin" / "python", "-m", "pip", "config", "list"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line.partition("=") for line in done.stdout.splitlines()]
    return {
        key.removeprefix(scope): str(ast.literal_eval(value))
        for scope in PIP_SCOPES
        for key, _, value in lines
        if key.startswith(scope)
    }


def uv_settings(pip: Mapping[str, str]) -> dict[str, str]:
    """Environment variables of uv equivalent to these settings of pip."""
    found = {UV_NAMES[key]: " ".join(pip[key].split()) for key in UV_NAMES if pip.get(key)}
    # If several indexes have a version, uv uses the first; its default index comes last.
    *first, last = [pip.get("index-url", PYPI), *pip.get("extra-index-url", "").split()]
    found |= {"UV_DEFAULT_INDEX": last} | ({"UV_INDEX": " ".join(first)} if first else {})
    if links := found.get("UV_FIND_LINKS"):
        found["UV_FIND_LINKS"] = links.replace(" ", ",")
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
