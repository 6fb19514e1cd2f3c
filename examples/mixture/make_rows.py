"""Writes the rows of the mixture: sums, and pairs of numbers of which the larger is asked.

python examples/mixture/make_rows.py [--out examples/mixture/rows]
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

PAIRS = 300


def sums() -> Iterator[dict[str, object]]:
    """All sums of two digits."""
    for a in range(10):
        for b in range(10):
            yield {"question": f"What is {a} + {b}?", "answer": a + b}


def pairs(rng: random.Random) -> Iterator[dict[str, object]]:
    """Two different numbers below a hundred."""
    for _ in range(PAIRS):
        a, b = rng.sample(range(10, 100), 2)
        yield {"first": a, "second": b, "larger": max(a, b)}


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description="Write the rows of the mixture.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "rows")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name, rows in (("sums", sums()), ("pairs", pairs(random.Random(0)))):
        text = "".join(f"{json.dumps(row)}\n" for row in rows)
        (out / f"{name}.jsonl").write_text(text)


if __name__ == "__main__":
    main()
