"""What one call leases to a worker, as the script that writes it takes it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from paceline_experience.ledger.generation.allocation import Wave
from paceline_experience.ledger.sources import Sources
from paceline_experience.ledger.task_cursor import Draw, draw_fields


@dataclass(slots=True)
class LeasePlan:
    """Episodes to lease, and groups to admit for them."""

    sources: Sources  # its tasks are from; the job may be over when they are read
    lease: list[tuple[str, list[int]]] = field(default_factory=list[tuple[str, list[int]]])
    admit: list[tuple[str, Draw, Wave | None]] = field(
        default_factory=list[tuple[str, Draw, "Wave | None"]]
    )

    def script_argument(
        self, *, worker_id: str, max_staleness: int, batch_groups: int, group_size: int, feed: str
    ) -> str:
        """As `lease.lua` takes it; `feed`: the cursor after the draws of the plan."""
        fields = {
            "worker": worker_id,
            "max_staleness": max_staleness,
            "batch_groups": batch_groups,
            "group_size": group_size,
            "admit": [
                {"group": name, **draw_fields(drawn), **_wave_fields(wave)}
                for name, drawn, wave in self.admit
            ],
            "lease": [{"group": name, "indices": indices} for name, indices in self.lease],
            "feed": feed,
        }
        return json.dumps(fields)


def _wave_fields(wave: Wave | None) -> dict[str, object]:
    if wave is None:
        return {}
    return {"size": wave.count, **({"starts": wave.starts} if wave.starts else {})}
