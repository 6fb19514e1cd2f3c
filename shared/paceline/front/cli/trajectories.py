"""`paceline trajectories`: the stored episodes of a job, and what was said in them."""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import takewhile
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from rich.text import Text

from paceline.enums import Purpose
from paceline.errors import ConfigError, InvalidError, NotFoundError
from paceline.errors.extras import not_installed
from paceline.front.api.documents import JobView
from paceline.front.api.episodes import ListedEpisode
from paceline.front.cli.entry import Exit
from paceline.front.cli.target.clients import StoredClient, reader_of
from paceline.front.cli.terminal.console import SafeConsole
from paceline.front.cli.terminal.pager import pager
from paceline.front.cli.terminal.printing import say
from paceline.front.cli.terminal.tables import Column, FittingTable
from paceline.front.cli.terminal.tokens import Colouring, Pieces, legend, numbered, transcript_text
from paceline.front.client.client import Client
from paceline.platform.text import visible
from paceline.types import Trajectory

_PAGE, _BODIES = 200, 16  # episodes asked for at once, without and with trajectories
_FOLLOW_S = 2.0
_MOST_NEW = 200  # that `--follow` shows at once
_TEXT = 60
_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
_JSON = TypeAdapter(ListedEpisode)
_Key = tuple[str, int, int]


def trajectories(arguments: Namespace) -> int:
    """`paceline trajectories JOB`."""
    if arguments.limit < 1:
        raise ConfigError("--limit: at least 1")
    with reader_of(arguments) as client:
        if arguments.follow:
            return _follow(client, arguments)
        episodes = list(_matching(client, arguments, limit=arguments.limit))
        if arguments.episode and not episodes:
            raise NotFoundError(f"episode {arguments.episode!r} is not stored")
        _show(client, arguments, episodes)
    return Exit.OK


def _matching(client: Client, arguments: Namespace, *, limit: int) -> Iterator[ListedEpisode]:
    """At most `limit` episodes that were asked for, newest first."""
    filters = _filters(arguments)
    index = _index(arguments.episode)
    size = _BODIES if filters["trajectories"] else _PAGE
    token = ""
    while limit > 0:
        page = client.list_episodes(
            arguments.job, page_size=min(size, max(limit, 1)), page_token=token, **filters
        )
        for episode in page.episodes:
            if index in (None, episode.index) and limit > 0:
                limit -= 1
                yield episode
        token = page.next_page_token
        if not token:
            return


def _filters(arguments: Namespace) -> dict[str, Any]:
    group = arguments.group or arguments.episode.rpartition("/")[0]
    return {
        "group_id": group,
        "purpose": Purpose.EVAL.value if arguments.eval else "",
        "reward": arguments.reward,
        "step": arguments.step,
        "age": arguments.age,
        "task_id": arguments.task,
        "status": arguments.status,
        "failed": arguments.failed or None,
        "dropped": arguments.dropped or None,
        "trajectories": _in_full(arguments) or None,
    }


def _index(episode: str) -> int | None:
    """The place in its group of an episode as the list names it, `GROUP/INDEX`."""
    if not episode:
        return None
    group, _, index = episode.rpartition("/")
    if not group or not index.isdecimal():
        raise InvalidError(f"{episode!r} is no episode; write GROUP/INDEX, as the list does")
    return int(index)


def _in_full(arguments: Namespace) -> bool:
    return bool(arguments.episode or arguments.group or arguments.show)


def _follow(client: Client, arguments: Namespace) -> int:
    """Show what is stored, then what is new, until the job ends."""
    if isinstance(client, StoredClient):
        client.check_over(arguments.job)
    seen: set[_Key] = set()
    most = before = arguments.limit
    step = sys.maxsize
    while True:
        status = client.get(arguments.job).status
        if arguments.dropped:
            episodes = _matching(client, arguments, limit=sys.maxsize)
            since = min(step, status.step)  # a trainer that starts again goes back
            new = unseen_samples(episodes, seen, since=since, most=most, before=before)
        else:
            episodes = _matching(client, arguments, limit=most)
            new = list(takewhile(lambda episode: _key(episode) not in seen, episodes))
            seen.update(map(_key, new))
        if new:
            _show(client, arguments, list(reversed(new)), paged=False)
        if status.state.terminal:
            return Exit.OK
        most, before, step = _MOST_NEW, 0, status.step
        time.sleep(_FOLLOW_S)


def unseen_samples(
    episodes: Iterable[ListedEpisode], seen: set[_Key], *, since: int, most: int, before: int
) -> list[ListedEpisode]:
    """The first `most` samples that are not in `seen`, which gets all that were looked at.

    Samples come newest step first, but within a step by name, so that new ones may be anywhere
    among those of step `since` and later. Of earlier steps there is nothing new: they are looked
    at only until there are `before`.
    """
    new: list[ListedEpisode] = []
    for episode in episodes:
        if episode.step < since and len(new) >= before:
            break
        if _key(episode) not in seen and len(new) < most:
            new.append(episode)
        seen.add(_key(episode))
    return new


def _show(
    client: Client, arguments: Namespace, episodes: Sequence[ListedEpisode], *, paged: bool = True
) -> None:
    if arguments.json:
        for episode in episodes:  # ASCII: no byte of a model's text reaches the terminal as it is
            say(json.dumps(as_json(episode), allow_nan=True))
        return
    console = SafeConsole()
    if not episodes:
        console.print("no stored episode is as asked for", markup=False)
        return
    color: Colouring = arguments.color
    with pager(console) if paged and not arguments.no_pager else nullcontext():
        if not _in_full(arguments):
            console.print(table_of(episodes))
            return
        pieces = _pieces(client, client.get(arguments.job), arguments.model)
        console.print(legend(color))
        for episode in episodes:
            console.print(episode_text(episode, color=color, pieces=pieces), soft_wrap=True)


def as_json(episode: ListedEpisode) -> dict[str, Any]:
    """An episode; with its trajectory, also the text of its first transcript in two parts."""
    fields: dict[str, Any] = _JSON.dump_python(episode, mode="json")
    if (trajectory := episode.trajectory) is not None:
        fields["prompt_text"] = trajectory.prompt_text
        fields["completion_text"] = trajectory.completion_text or trajectory.response_text
    return fields


def table_of(episodes: Iterable[ListedEpisode]) -> FittingTable:
    """One row per episode."""
    table = FittingTable(
        *("episode", "step", "reward", Column("parts", 6), "adv", Column("age", 4)),
        *(Column("tokens", 3), Column("turns", 5), Column("", 2)),
        Column("says", 1, is_long=True, is_cut=True),
    )
    for episode in episodes:
        table.add_row(*_row(episode))
    return table


def _row(episode: ListedEpisode) -> tuple[str, ...]:
    said = " ".join(visible(episode.text).split())
    return (
        visible(f"{episode.group_id}/{episode.index}"),
        str(episode.step) if episode.step >= 0 else "-",
        f"{episode.reward:.3f}",
        _parts(episode.parts),
        "-" if episode.advantage is None else f"{episode.advantage:+.2f}",
        "-" if episode.age is None else str(episode.age),
        str(episode.policy_tokens),
        str(episode.turns),
        _state(episode),
        said if len(said) <= _TEXT else said[: _TEXT - 1] + "…",
    )


def episode_text(episode: ListedEpisode, *, color: Colouring, pieces: Pieces) -> Text:
    """An episode in full: what became of it, and its transcripts."""
    text = Text(visible(f"\n{episode.group_id}/{episode.index}"), "bold")
    text.append(f"  task {visible(episode.task_id[:12])}  step {episode.step}", "dim")
    if episode.age is not None:
        text.append(f"  age {episode.age}", "dim")
    text.append(f"  {episode.total_s:.2f} s", "dim")
    if state := _state(episode):
        text.append(f"  {state}", "bold red")
    text.append(f"\n  reward {episode.reward:.3f}", "bold")
    if episode.advantage is not None:
        text.append(f"  advantage {episode.advantage:+.3f}")
    if episode.parts:
        text.append(f"  ({_parts(episode.parts)})")
    if episode.answer:
        text.append(f"  answer {visible(episode.answer)!r}")
    if episode.trajectory is not None:
        _append_trajectory(text, episode.trajectory, color=color, pieces=pieces)
    return text


def _append_trajectory(
    text: Text, trajectory: Trajectory, *, color: Colouring, pieces: Pieces
) -> None:
    if detail := trajectory.score.detail:
        text.append(f"  {visible(detail)}", "dim")
    text.append("\n")
    for number, transcript in enumerate(trajectory.transcripts):
        if len(trajectory.transcripts) > 1:
            where = f" of {transcript.parent}, from token {transcript.branch_token}"
            text.append(f"  transcript {number}", "bold")
            text.append(f"{where if transcript.parent >= 0 else ''}\n", "dim")
        text.append_text(transcript_text(transcript, color=color, pieces=pieces))


def _pieces(client: Client, job: JobView, folder: Path | None) -> Pieces:
    """Decodes with the tokenizer of the job's model; ids where it cannot be had."""
    try:
        from paceline.tokens.chat import Tokenizer

        files = tokenizer_files(client, job) if folder is None else _folder(folder)
        return Tokenizer.from_files(files).pieces
    except (ModuleNotFoundError, NotFoundError, InvalidError) as error:
        why = not_installed(error) if isinstance(error, ModuleNotFoundError) else error.message
        say(f"{why}; tokens are shown as ids (--model names a folder with a tokenizer)", error=True)
        return numbered


def tokenizer_files(client: Client, job: JobView) -> Mapping[str, bytes]:
    """Files of the tokenizer that a job was accepted with, by name; none if it has none."""
    names = [name for name in _FILES if name in job.artifacts]
    return {name: client.get_model_file(job.status.job_id, name).text.encode() for name in names}


def _folder(folder: Path) -> Mapping[str, bytes]:
    paths = [folder / name for name in _FILES]
    return {path.name: path.read_bytes() for path in paths if path.is_file()}


def _state(episode: ListedEpisode) -> str:
    words = [f"dropped: {visible(episode.dropped)}"] if episode.dropped else []
    words += ["cut off"] if episode.truncated else []
    words += [] if episode.status == "ok" else [episode.status.value.replace("_", " ")]
    return ", ".join(words)


def _parts(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{visible(name)} {value:g}" for name, value in parts.items())


def _key(episode: ListedEpisode) -> _Key:
    return episode.group_id, episode.index, episode.attempt
