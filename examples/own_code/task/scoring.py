"""Scores of a job.

Packages of the worker's image may be imported and files of this folder read. There is no network,
and nothing else of the worker's files.
"""

from __future__ import annotations

import json

from paceline.plugins import RewardInput


def close_to(item: RewardInput, *, scale: float) -> float:
    """1 for the right number, less the further away it is, 0 for what is no number."""
    answer = float(json.loads(item.task.payload)["answer"])
    try:
        given = float(item.response.strip())
    except ValueError:
        return 0.0
    return max(0.0, 1.0 - abs(given - answer) / scale)
