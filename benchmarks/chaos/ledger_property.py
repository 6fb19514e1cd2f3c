"""Random histories of the ledger in bulk: the property machine of the tests, for many steps.

After every step (a lease, a submission, a crash, a rewind, a loss of the store's last writes) the
audit is clean, every payload is needed, and nothing is trained or observed twice. The machine runs
in chunks with a seed each, one on each core, so a failure names its seed. What was checked is
recorded after each round of chunks; a run that was interrupted continues where it stopped.
`make bench-ledger-histories` runs it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from pipeline import machine
from rig.installation import ROOT
from rig.smoke import arguments as arguments_of

TEST = "tests/unit/paceline_experience/ledger/test_ledger_machine.py"
_COUNTED = re.compile(r"steps checked: (\d+)")


def main() -> int:
    """Run chunks until so many steps are checked, or one fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--chunk", type=int, default=10_000, help="steps with one seed")
    parser.add_argument("--seed", type=int, default=0, help="of the first chunk")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path, required=True)
    arguments = arguments_of(parser, steps=20, chunk=20, processes=1)
    found: dict[str, Any] = {"machine": machine(), "first_seed": arguments.seed, "chunk_steps": 0}
    found |= {"wanted": 0, "seeds": 0, "steps": 0, "seconds": 0.0, "violations": 0}
    if arguments.json.exists():  # it goes on
        found |= json.loads(arguments.json.read_text())
    found |= {"wanted": arguments.steps, "chunk_steps": arguments.chunk}
    with ThreadPoolExecutor(arguments.processes) as threads:
        while found["steps"] < arguments.steps and not found["violations"]:
            first = found["first_seed"] + found["seeds"]
            started = time.monotonic()
            seeds = range(first, first + arguments.processes)
            checked = [*threads.map(partial(chunk, steps=arguments.chunk), seeds)]
            failed = [s for s, steps in zip(seeds, checked, strict=True) if steps is None]
            found["seeds"] += len(seeds)
            found["steps"] += sum(steps or 0 for steps in checked)
            found["seconds"] = round(found["seconds"] + time.monotonic() - started, 1)
            found |= {"violations": len(failed), "failed_seeds": failed}
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.write_text(json.dumps(found, indent=1) + "\n")
            told = {key: found[key] for key in ("seeds", "steps", "seconds", "failed_seeds")}
            print(json.dumps(told), flush=True)
    return 1 if found["violations"] else 0


def chunk(seed: int, *, steps: int) -> int | None:
    """Run the machine with a seed; the number of steps it checked, None if one failed."""
    options = ["-q", "-s", "-x", "-p", "no:cacheprovider", f"--hypothesis-seed={seed}", TEST]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        cwd=ROOT,
        env={**os.environ, "PACELINE_LEDGER_STEPS": str(steps)},
        capture_output=True,
        text=True,
        check=False,
    )
    counted = _COUNTED.search(done.stdout)
    if done.returncode or counted is None:
        print(done.stdout[-20_000:] + done.stderr[-2_000:])
        return None
    return int(counted[1])


if __name__ == "__main__":
    sys.exit(main())
