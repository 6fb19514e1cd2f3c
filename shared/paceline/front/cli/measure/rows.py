"""Episodes as rows of a file: one for each transcript, each once, in the order of their tasks."""

from __future__ import annotations

import importlib
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from paceline.enums import TokenSource
from paceline.errors import ConfigError, StateError
from paceline.types import Trajectory, Transcript, VersionRun

_BATCH = 256  # rows that are written at once
Decode = Callable[[Sequence[int]], str]
Row = dict[str, Any]
Place = tuple[str, int, int, int]
FORMATS = (".jsonl", ".parquet")
# Fields that only workers of the installation know, or only an outside endpoint reports.
_OF_TOKENS = (
    *("prompt_ids", "completion_ids", "completion_mask"),
    *("logprobs", "versions", "version"),
)
_OF_MESSAGES = ("messages", "model", "finish_reason", "prompt_tokens", "completion_tokens")
_UNKNOWN: Mapping[str, Any] = dict.fromkeys(("prompt", "completion", *_OF_TOKENS, *_OF_MESSAGES))


def check_path(path: Path) -> None:
    """Raise `ConfigError` for a file that cannot be written, before anything is sampled."""
    if path.suffix not in FORMATS:
        raise ConfigError(f"--out: {path} ends in {path.suffix!r}; allowed: {', '.join(FORMATS)}")
    if path.exists():
        raise ConfigError(f"--out: {path} exists already")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--out: {path.parent} is no folder")
    if path.suffix == ".parquet":
        _parquet()


def rows_of(episode: Trajectory, *, job_id: str, decode: Decode) -> Iterator[tuple[Place, Row]]:
    """The rows of an episode, and where each belongs."""
    run, _, task = episode.group_id.removeprefix(f"{job_id}.e").rpartition(".")
    name = run.partition("-")[2]
    for number, transcript in enumerate(episode.transcripts):
        place = (name, int(task), episode.index, number)
        yield place, _row(episode, transcript, place, decode)


def _row(episode: Trajectory, transcript: Transcript, place: Place, decode: Decode) -> Row:
    name, task, sample, number = place
    said = chat_of(transcript) if transcript.messages else tokens_of(transcript, decode)
    score = episode.score
    return {
        "set": name or "eval",
        "task": task,
        "task_id": episode.task_id,
        "sample": sample,
        "transcript": number,
        **_UNKNOWN,
        **said,
        "reward": score.reward,
        "parts": dict(score.parts),
        "status": str(score.status),
        "answer": score.normalised_answer,
        "truncated": episode.truncated,
        "seed": episode.sampling.seed,
        "temperature": episode.sampling.temperature,
        "group_id": episode.group_id,
    }


def tokens_of(transcript: Transcript, decode: Decode) -> Row:
    """A row with the tokens that workers of the installation have sampled."""
    sampled = [span for span in transcript.spans if span.source is TokenSource.POLICY]
    start = transcript.num_prompt_tokens
    prompt, completion = transcript.tokens[:start], transcript.tokens[start:]
    mask = [0] * len(completion)
    for span in sampled:
        mask[span.start - start : span.end - start] = [1] * (span.end - span.start)
    logprobs, versions = iter(transcript.logprobs), _spread(transcript.versions)
    return {
        "prompt": decode(prompt),
        "completion": decode(completion),
        "prompt_ids": list(prompt),
        "completion_ids": list(completion),
        "completion_mask": mask,
        "logprobs": [next(logprobs) if is_sampled else None for is_sampled in mask],
        "versions": [next(versions) if is_sampled else None for is_sampled in mask],
        "version": transcript.oldest_version,
    }


def chat_of(transcript: Transcript) -> Row:
    """A row with an outside endpoint's answers: messages, whose tokens are not known."""
    messages: list[dict[str, Any]] = json.loads(transcript.messages)
    replies = transcript.replies
    own = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    start = own[-len(replies)] if 0 < len(replies) <= len(own) else len(messages)
    texts = [message["content"] for message in messages]
    for place, reply in zip(own[-len(replies) :], replies, strict=False):
        texts[place] = reply.text
    last = replies[-1] if replies else None
    return {
        "prompt": "\n\n".join(texts[:start]),
        "completion": "\n\n".join(texts[start:]),
        "messages": messages,
        "model": last.model if last else None,
        "finish_reason": last.finish_reason if last else None,
        "prompt_tokens": _sum_known([reply.prompt_tokens for reply in replies]),
        "completion_tokens": _sum_known([reply.completion_tokens for reply in replies]),
    }


def _sum_known(counts: Sequence[int]) -> int | None:
    """Null if the endpoint has left one out."""
    return None if any(count < 0 for count in counts) else sum(counts)


def _spread(runs: Iterable[VersionRun]) -> Iterator[int]:
    return (run.version for run in runs for _ in range(run.count))


class RowFile:
    """Collects rows on disk in any order, and writes them in theirs, as one file at once."""

    def __init__(self) -> None:
        self._lines: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 closed by `close`
        self._places: dict[Place, int] = {}

    def add(self, place: Place, row: Row) -> None:
        """Add a row.

        Raises:
            StateError: there is one in its place already.
        """
        if place in self._places:
            raise StateError(f"task {place[1]} of {place[0] or 'eval'} has sample {place[2]} twice")
        self._places[place] = self._lines.seek(0, 2)
        self._lines.write(json.dumps(row).encode() + b"\n")

    @property
    def num_episodes(self) -> int:
        """Episodes, of which each has one row or several."""
        return len({place[:3] for place in self._places})

    def write(self, path: Path) -> int:
        """Write all rows; returns how many. The file appears when it is complete.

        Raises:
            ConfigError: it cannot be written.
        """
        draft = path.with_name(f".{path.name}.part")
        try:
            if path.suffix == ".parquet":
                _write_parquet(self._batches(), draft)
            else:
                with draft.open("wb") as file:
                    for batch in self._batches():
                        file.writelines(batch)
            draft.replace(path)
        except OSError as error:
            raise ConfigError(f"--out: {path}: {error.strerror}") from None
        finally:
            with suppress(OSError):
                draft.unlink()
        return len(self._places)

    def close(self) -> None:
        """Forget the rows."""
        self._lines.close()

    def _batches(self) -> Iterator[list[bytes]]:
        places = [offset for _, offset in sorted(self._places.items())]
        for first in range(0, len(places), _BATCH):
            batch: list[bytes] = []
            for offset in places[first : first + _BATCH]:
                self._lines.seek(offset)
                batch.append(self._lines.readline())
            yield batch


def _parquet() -> tuple[Any, Any]:
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ModuleNotFoundError:
        raise ConfigError("--out: Parquet needs pyarrow: pip install 'paceline[data]'") from None


def _write_parquet(batches: Iterable[list[bytes]], path: Path) -> None:
    arrow, parquet = _parquet()
    text, whole, real = arrow.string(), arrow.int64(), arrow.float64()
    kinds = {
        "set": text,
        "task": whole,
        "task_id": text,
        "sample": whole,
        "transcript": whole,
        "prompt": text,
        "completion": text,
        "prompt_ids": arrow.list_(whole),
        "completion_ids": arrow.list_(whole),
        "completion_mask": arrow.list_(arrow.int8()),
        "logprobs": arrow.list_(real),
        "versions": arrow.list_(whole),
        "version": whole,
        "messages": arrow.list_(
            arrow.struct(
                [
                    *(("role", text), ("content", text)),
                    *(("tool_call_id", text), ("tool_calls", text)),
                ]
            )
        ),
        "model": text,
        "finish_reason": text,
        "prompt_tokens": whole,
        "completion_tokens": whole,
        "reward": real,
        "parts": arrow.map_(text, real),
        "status": text,
        "answer": text,
        "truncated": arrow.bool_(),
        "seed": whole,
        "temperature": real,
        "group_id": text,
    }
    schema = arrow.schema(list(kinds.items()))
    with parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        for batch in batches:
            rows = [json.loads(line) for line in batch]
            for row in rows:
                row["parts"] = list(row["parts"].items())
                row["messages"] = row["messages"] and [*map(_as_columns, row["messages"])]
            writer.write_table(arrow.Table.from_pylist(rows, schema=schema))


def _as_columns(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose calls of tools, with arguments of any form, are JSON."""
    calls = message.get("tool_calls")
    return message if calls is None else {**message, "tool_calls": json.dumps(calls)}
