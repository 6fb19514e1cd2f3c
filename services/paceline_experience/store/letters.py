"""One letter per state of an episode, in the records that scripts read and write."""

from __future__ import annotations

from paceline.enums import EpisodeState

LETTERS: dict[EpisodeState, str] = {
    EpisodeState.QUEUED: "q",
    EpisodeState.LEASED: "l",
    EpisodeState.FINISHED: "f",
    EpisodeState.READY: "r",
    EpisodeState.TAKEN: "t",
    EpisodeState.TRAINED: "n",
    EpisodeState.DURABLE: "d",
    EpisodeState.MEASURED: "m",
    EpisodeState.DROPPED: "x",
}
