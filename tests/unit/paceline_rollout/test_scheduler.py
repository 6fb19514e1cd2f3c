"""Rounds of the scheduler that go wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.plugins import EngineRequest
from paceline_rollout.activation import Activation, Swap
from paceline_rollout.engines.torch.cache import Block
from paceline_rollout.engines.torch.model import TorchModel
from paceline_rollout.engines.torch.scheduler import Scheduler


class Narrow(TorchModel):
    """Runs out of memory over long prompts."""

    def prefill(self, block: Block, tokens: Sequence[Sequence[int]]) -> None:
        """Short ones only."""
        if block.columns > 50:
            raise MemoryError
        super().prefill(block, tokens)


@pytest.mark.parametrize("long", [["long"], ["long", "longer"]])
def test_requests_whose_prefill_fails_are_refused(
    model_of: Any,
    snapshot_of: Any,
    request_of: Callable[..., EngineRequest],
    tmp_path: Path,
    long: list[str],
) -> None:
    model = model_of()
    model.config.save_pretrained(tmp_path)
    scheduler = Scheduler(
        policy=Narrow(model_dir=tmp_path, dtype="float32", max_context=64, device="cpu"),
        max_context=64,
        max_concurrent=8,
        prefill_tokens=1000,
        cache_bytes=1 << 20,
        least_shared=128,
        decode=None,
    )
    scheduler.propose(Swap(scheduler.prepare(snapshot_of(model)), Activation.IN_FLIGHT))
    scheduler.tick()
    scheduler.add([request_of("short", [1, 2]), *(request_of(name, [1] * 60) for name in long)])
    with pytest.raises(MemoryError):
        scheduler.tick()
    scheduler.fail("no memory")
    ends = [(one.request_id, one.error_code) for one in scheduler.out if one.finish_reason]
    assert sorted(ends) == sorted((name, "INTERNAL") for name in ["short", *long])
    assert not scheduler.busy
    scheduler.add([request_of("next", [1, 2], max_tokens=3)])
    for _ in range(3):
        scheduler.tick()
    assert scheduler.out[-1].finish_reason == "length"
