"""Signs of recovery: each returns when interrupted work first continued; None: not yet."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import psutil
from chaos.view import Attempt, Key, Sign, View

from paceline.errors import PacelineError
from paceline.front.client.client import Client


def episodes_elsewhere(view: View, pids: set[int], since: float) -> Sign | None:
    """Another worker got an answer in an episode of these workers; None if they had none."""
    keys = _only_theirs(view, pids)
    return _answered(view, keys, pids, since) if keys else None


def episodes_go_on(view: View, pids: set[int], since: float) -> Sign | None:
    """An episode of these workers got an answer, in any worker; None if they had none."""
    keys = _only_theirs(view, pids)
    return _answered(view, keys, set(), since) if keys else None


def _only_theirs(view: View, pids: set[int]) -> set[Key]:
    """Groups of these workers only: siblings in other workers would be mistaken for a sign."""
    mine = {each.key for each in view.open_at(pids)}
    return mine - {each.key for each in view.attempts.values() if each.pid not in pids}


def _answered(view: View, keys: set[Key], not_by: set[int], since: float) -> Sign:
    return lambda: view.first(
        since,
        lambda event: (
            event["event"] == "answered"
            and event["pid"] not in not_by
            and (event["task"], event["seed"]) in keys
        ),
    )


def scores_elsewhere(view: View, pids: set[int], since: float) -> Sign | None:
    """Another process scored an episode of these processes; None if they had none."""
    names = {name for name, pid in view.scoring.items() if pid in pids}
    if not names:
        return None
    return lambda: view.first(
        since,
        lambda event: (
            event["event"] == "scored" and event["pid"] not in pids and event["name"] in names
        ),
    )


def all_answered(view: View, since: float, *, pause_s: float) -> Sign | None:
    """All training episodes that were waiting for tokens have their answers.

    Which of them a rollout worker had is not observable, so this waits for all.
    """
    view.look()  # episodes that closed just before no longer wait
    waiting = {
        place
        for place, each in view.attempts.items()
        if not each.held_out and _waits(each, since, pause_s)
    }
    if not waiting:
        return None

    def sign() -> float | None:
        seen: dict[tuple[int, int], float] = {}
        for event in view.since(since):
            if event["event"] in ("answered", "closed"):
                seen[event["pid"], event["episode"]] = event["at"]
        left = {place for place in waiting - seen.keys() if psutil.pid_exists(place[0])}
        answered = [seen[place] for place in waiting & seen.keys()]
        return None if left else max(answered, default=None)

    return sign


def _waits(attempt: Attempt, at: float, pause_s: float) -> bool:
    return attempt.since <= (at - pause_s if attempt.turn_over else at)


def new_episode(view: View, since: float, pid: Callable[[], int], old: int) -> Sign:
    """An answer in an episode that was leased after another process replaced `old`."""

    def sign() -> float | None:
        new = pid()
        if new in (0, old):
            return None
        try:
            began = psutil.Process(new).create_time()
        except psutil.NoSuchProcess:
            return None
        return handed_out(view, max(began, since))()

    return sign


def handed_out(view: View, since: float) -> Sign:
    """An answer in an episode that began after a moment."""

    def sign() -> float | None:
        begun = {
            (event["pid"], event["episode"])
            for event in view.since(since)
            if event["event"] == "reset" and not event["held_out"]
        }
        return view.first(
            since,
            lambda event: (
                event["event"] == "answered" and (event["pid"], event["episode"]) in begun
            ),
        )

    return sign


def committed(view: View, since: float, job_id: str, *, after: int = -1) -> Sign:
    """A step is committed by an incarnation above `after`.

    The batch of the next step comes only then, and is what the journal tells of.
    """

    def sign() -> float | None:
        found = sorted(
            (event["at"], event["step"], event["incarnation"])
            for event in view.since(since)
            if event["event"] == "batch" and event["job"] == job_id and event["incarnation"] > after
        )
        steps = {(step, number) for _, step, number in found}
        nexts = [at for at, step, number in found if (step - 1, number) in steps]
        return min(nexts, default=None)

    return sign


def process_again(pid: Callable[[], int], old: int) -> Sign:
    """Another process has been started in the place of `old`."""

    def sign() -> float | None:
        new = pid()
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(new).create_time() if new not in (0, old) else None
        return None

    return sign


def answers(client: Client, job_id: str, clock: Callable[[], float]) -> Sign:
    """The gateway answers a call that was made after the fault."""

    def sign() -> float | None:
        with suppress(PacelineError):
            client.get(job_id)
            return clock()
        return None

    return sign
