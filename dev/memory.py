"""Peak memory of a run: the proportional set sizes of all of its processes, added up.

    python dev/memory.py [--json FILE] COMMAND...

for example `python dev/memory.py --json benchmarks/results/quick_start.json paceline run job.yaml`.
`Pss` of `/proc/PID/smaps_rollup` counts a page that n processes share as the n-th part for each; a
sum of resident set sizes would count it n times. The figures of the quick start in README and docs
are those of its stored result.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "quick_start.json"
INTERVAL_S = 0.3
KINDS = {"paceline_trainer": "trainer", "paceline_rollout": "rollout"}
OTHERS = "others"


def files() -> dict[Path, str]:
    """Path and content of the documents that name the figures of the quick start."""
    total, trainer, rollout, others = (
        json.loads(RESULT.read_text())[f"{name}_gib"] for name in ("total", *KINDS.values(), OTHERS)
    )
    figures = {
        "docs/quickstart.md": [("one peaks at # GiB", total)],
        "docs/sizing.md": [
            ("in bfloat16 peaks at # GiB", total),
            ("the trainer has # GiB, of", trainer),
            ("the rollout worker # GiB, a", rollout),
            ("all else # GiB", others),
        ],
    }
    return {ROOT / name: _with(ROOT / name, placed) for name, placed in figures.items()}


def _with(path: Path, figures: list[tuple[str, float]]) -> str:
    """The text with each figure in place of the `#` of its phrase, which may span two lines."""
    text = path.read_text()
    for phrase, figure in figures:
        before, after = (re.sub(" +", r"\\s+", part) for part in phrase.split("#"))
        pattern = rf"({before})[\d.]+({after})"
        text, count = re.subn(pattern, rf"\g<1>{figure:.1f}\g<2>", text)
        if count != 1:
            raise ValueError(f"{path}: {phrase!r} is there {count} times; once is due")
    return text


def sizes(process: psutil.Process) -> Iterator[tuple[str, int]]:
    """Kind and bytes of a process and all that it has started."""
    for each in (process, *process.children(recursive=True)):
        try:
            words = " ".join(each.cmdline())
            lines = Path(f"/proc/{each.pid}/smaps_rollup").read_text().splitlines()
        except (psutil.Error, OSError):  # it has just ended
            continue
        found = next((line.split()[1] for line in lines if line.startswith("Pss:")), "0")
        kind = next((kind for name, kind in KINDS.items() if name in words), OTHERS)
        yield kind, int(found) << 10


def measured(command: list[str]) -> tuple[int, dict[str, float]]:
    """The exit code of a command, and GiB by kind of process when all of them had the most."""
    most: Counter[str] = Counter()
    with subprocess.Popen(command) as run:
        process = psutil.Process(run.pid)
        while run.poll() is None:
            now: Counter[str] = Counter()
            for kind, size in sizes(process):
                now[kind] += size
            most = max(most, now, key=Counter.total)
            time.sleep(INTERVAL_S)
    figures = {"total": most.total(), **{kind: most[kind] for kind in (*KINDS.values(), OTHERS)}}
    return run.returncode, {f"{name}_gib": round(n / (1 << 30), 2) for name, n in figures.items()}


def main(arguments: list[str]) -> int:
    """Run, print and write the figures; the exit code is that of the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args(arguments)
    code, figures = measured(given.command)
    text = json.dumps(figures, indent=2)
    print(text, file=sys.stderr)
    if given.json is not None and code == 0:
        given.json.write_text(text + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
