"""Names and shapes of a model's tensors, to reject a snapshot before it reaches the server.

SGLang skips unknown tensors and crashes on those with a wrong shape.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.plugins import WeightSnapshot


class Layout:
    """Checkpoint names and shapes of a model's tensors, from its `config.json`.

    SGLang loads only these: a snapshot with names in memory has to have the same.
    """

    def __init__(self, model_dir: Path) -> None:
        from transformers import AutoConfig

        from paceline.weights.names import CheckpointNames

        config: Any = AutoConfig.from_pretrained(model_dir, trust_remote_code=False)
        names = CheckpointNames(config)
        self._shapes, self._required = names.shapes, names.required

    def check(self, snapshot: WeightSnapshot) -> None:
        """Raise `InvalidError` unless the snapshot is complete and fits the model."""
        from paceline.weights.names import check_layout

        check_layout(
            (entry for entry, _ in snapshot.tensors()),
            snapshot.header.tied,
            shapes=self._shapes,
            required=self._required,
        )


def vocab_size(model_dir: Path) -> int:
    """Number of token ids, from `config.json`."""
    content: dict[str, Any] = json.loads((model_dir / "config.json").read_text())
    return int(content.get("vocab_size") or content["text_config"]["vocab_size"])
