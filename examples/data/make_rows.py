"""Writes rows/sums.jsonl, the data of data.yaml: `python examples/data/make_rows.py`."""

from __future__ import annotations

import json
import random
from pathlib import Path

NUM_ROWS = 600
OUT = Path(__file__).parent / "rows" / "sums.jsonl"


def main() -> None:
    """Write the file, the same every time."""
    chance = random.Random(0)
    pairs = chance.sample([(a, b) for a in range(10, 100) for b in range(10, 100)], NUM_ROWS)
    OUT.parent.mkdir(exist_ok=True)
    with OUT.open("w") as file:
        for number, (a, b) in enumerate(pairs):
            row = {
                "id": f"sum-{number}",
                "problem": {"a": a, "b": b},
                "solution": {"final": str(a + b)},
                "meta": {"carry": a % 10 + b % 10 > 9},
            }
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
