"""What an advantage is given and returns: the episodes of a batch as columns of numpy arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]
    Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Turns:
    """Turns of all episodes of a batch, in order; all arrays are [K]."""

    episodes: Ints  # index of its episode in the batch
    indices: Ints  # position within its episode, from 0
    starts: Ints  # policy tokens [start, end) of it, in [0, T]
    ends: Ints
    rewards: Floats  # as the environment gave them
    matched: Bools  # its action equals the expert's
    patched: Bools  # the expert's action took its place


@dataclass(frozen=True, slots=True)
class EpisodeBatch:
    """The episodes of a batch: N of them, with T policy tokens in total.

    The arrays must not be modified. Columns of the second half are None unless the options of the
    plug-in declare the need that is named with them.
    """

    groups: Ints  # [N], equal for episodes of one group
    tasks: Ints  # [N], position of the task in its source; the same in every epoch
    rewards: Floats  # [N]
    lengths: Ints  # [N], policy tokens
    truncated: Bools  # [N]
    answers: Sequence[str]  # [N], as normalised by the reward, clipped; empty: none was found
    parts: Mapping[str, Floats] = field(default_factory=dict[str, "Floats"])
    """The parts of the reward, [N] each; NaN where an episode lacks a part."""
    replayed: Bools | None = None  # [N], guests from earlier groups (`Replay`); None: none is
    parents: Ints | None = None  # [N], index of the episode it continues (allocators), else -1
    inherited: Ints | None = None  # [N], policy tokens at its start that it has from that episode
    advantages: Floats | None = None  # [N] or [T], by the part before; None in the first one
    weights: Floats | None = None  # [N], likewise
    logprobs: Floats | None = None  # [T], as reported by the engine (`tokens`)
    turns: Turns | None = None  # (`turns`)

    @property
    def starts(self) -> Ints:
        """[N + 1]: policy tokens of episode `i` are `starts[i]` to `starts[i + 1]`, in [0, T]."""
        import numpy as np

        return np.concatenate(([0], np.cumsum(self.lengths)))


@dataclass(frozen=True, slots=True)
class GroupOutcome:
    """A group that was decided, whether filters kept it, a part of it or nothing, or that failed.

    Tuples are [N], with all its scored episodes, also those that are not trained; N is 0 if it
    failed.
    """

    task: int  # position in the task source
    rewards: tuple[float, ...]
    answers: tuple[str, ...]
    filtered: bool = False  # nothing of it was kept
    lengths: tuple[int, ...] = ()  # policy tokens
    truncated: tuple[bool, ...] = ()
    parts: Mapping[str, tuple[float, ...]] = field(
        default_factory=dict[str, tuple[float, ...]], hash=False
    )
    """The parts of a reward that has several; NaN where an episode lacks a part."""
    kept: tuple[bool, ...] = ()  # whether filters left the episode in
    failed: str = ""  # why it was given up before all was scored, and does not come again
    variant: str = ""  # of the sampler's pick
    meta: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)
    replayed: tuple[float, ...] = ()
    """Rewards of the stored episodes that are trained with it (`Replay`). They are in no other
    column: they say nothing of the present policy."""


def progress(step: int, total_steps: int) -> float:
    """How far a job of `total_steps` is at `step`, from 0: 0 at the first, 1 at the last."""
    return min(step / max(total_steps - 1, 1), 1.0)


@dataclass(frozen=True, slots=True)
class Context:
    """What an advantage knows besides its batch, and a sampler besides outcomes.

    `memory` and what follows it is filled in for plug-ins that declare the need `memory`.
    """

    step: int  # of the trainer, from 0
    total_steps: int  # at which the job ends
    seed: int = 0
    memory: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """JSON values that the plug-in has stored, by key. It changes only by `Advantages.memory`."""
    outcomes: Sequence[GroupOutcome] = ()
    """All groups decided since the last batch was fixed, each once, in order of admission."""
    metrics: Sequence[Mapping[str, float]] = ()
    """What the trainer measured in its last steps, up to 20, the newest last."""

    @property
    def progress(self) -> float:
        """How far the job is: 0 at its first step, 1 at its last."""
        return progress(self.step, self.total_steps)


@dataclass(frozen=True, slots=True)
class Advantages:
    """What an advantage returns, if it is more than an array of values."""

    values: Floats  # [N], or [T]: one per policy token
    weights: Floats | None = None  # [N], >= 0; None: all 1. Episodes of weight 0 are not trained
    memory: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Keys of the memory to change and their new JSON values; None deletes a key."""
    notes: Mapping[str, float] = field(default_factory=dict[str, float])
    """Numbers for the log of this step, by name."""
