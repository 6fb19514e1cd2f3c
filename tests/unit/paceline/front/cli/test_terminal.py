"""What the terminal shows: nothing acts on it, and colours are where their meaning is."""

from __future__ import annotations

import io
import math
import re
import unicodedata
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import WordLevel

from paceline.enums import JobState, Purpose, TokenSource, WorkerKind
from paceline.errors import InvalidError
from paceline.front.api.activity import Activity, JobActivity, ProcessActivity
from paceline.front.api.blame import attribute
from paceline.front.api.documents import EpisodePage, JobView, MetricPage, MetricRow
from paceline.front.api.episodes import ListedEpisode
from paceline.front.cli.terminal.tokens import HEAT, Colouring, heat, numbered, transcript_text
from paceline.front.cli.top import as_json, screen
from paceline.front.cli.trajectories import as_json as episode_json
from paceline.front.cli.trajectories import episode_text, table_of, unseen_samples
from paceline.front.client.curves import figure, metric_curves, save
from paceline.platform.text import visible
from paceline.tokens.chat import Tokenizer
from paceline.types import (
    JobStatus,
    SamplingParams,
    Score,
    TokenSpan,
    Trajectory,
    Transcript,
    VersionRun,
)

# Moves the cursor, sets the title, clears the screen by C1, reorders, hides, reads as a tag.
HOSTILE = "\x1b[2J\x1b]0;pwned\x07\x9b2J\u202egnp.\u200b\u2028\U000e0041\x00\x7f\r"
ACTS = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def shown(*parts: Any, width: int = 400) -> str:
    """What a terminal without colours would be sent."""
    console = Console(file=io.StringIO(), width=width, force_terminal=True, no_color=True)
    for part in parts:
        console.print(part, soft_wrap=True)
    file: Any = console.file
    return file.getvalue()


def without_styles(text: str) -> str:
    """Without the sequences of styles, which are ours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def acts(text: str) -> set[str]:
    return {char for char in text if unicodedata.category(char) in ACTS and char not in "\n\t"}


@given(st.text())
def test_nothing_that_acts_is_left(text: str) -> None:
    assert not acts(visible(text))


@given(st.text(st.characters(categories=["L", "N", "P", "S", "M"])))
def test_what_can_be_read_stays(text: str) -> None:
    assert visible(text).replace("⟨U+2800⟩", "\u2800").replace("⟨U+3164⟩", "\u3164") == (
        text.replace("⟨U+2800⟩", "\u2800").replace("⟨U+3164⟩", "\u3164")
    ) or any(char in text for char in "\u115f\u1160\u2800\u3164\uffa0")


def transcript() -> Transcript:
    """A prompt of two tokens, two of the policy, one of a tool, and two of newer weights."""
    return Transcript(
        tokens=(0, 1, 2, 3, 4, 5, 6),
        spans=(
            TokenSpan(0, 2, TokenSource.TEMPLATE),
            TokenSpan(2, 4, TokenSource.POLICY),
            TokenSpan(4, 5, TokenSource.TOOL),
            TokenSpan(5, 7, TokenSource.POLICY),
        ),
        logprobs=(-0.01, -5.0, -1.0, -9.0),
        versions=(VersionRun(12, 3), VersionRun(13, 1)),
    )


def words(tokens: Any) -> list[str]:
    return [f"<{token}>" for token in tokens]


def style_of(text: Text, part: str) -> str:
    at = text.plain.index(part)
    return next(str(span.style) for span in text.spans if span.start <= at < span.end)


def test_each_colouring_shows_every_token_once() -> None:
    for color in get_args(Colouring):
        text = transcript_text(transcript(), color=color, pieces=words).plain
        places = [text.index(f"<{token}>") for token in range(7)]
        assert all(a < b for a, b in pairwise(places))
        assert all(text.count(f"<{token}>") == 1 for token in range(7))


def test_colours_mean_what_they_say() -> None:
    text = transcript_text(transcript(), color="logprob", pieces=words)
    assert style_of(text, "<2>") == heat(-0.01) == HEAT[0][1]
    assert style_of(text, "<3>") == heat(-5.0) != heat(-0.01)
    assert style_of(text, "<0>") == style_of(text, "<4>")  # nobody sampled them
    assert "lowest log-prob -5.00" in text.plain
    text = transcript_text(transcript(), color="version", pieces=words)
    assert text.plain.index("│v12│") < text.plain.index("<5>") < text.plain.index("│v13│<6>")
    assert style_of(text, "<2>") != style_of(text, "<6>")
    text = transcript_text(transcript(), color="source", pieces=words)
    assert len({style_of(text, f"<{token}>") for token in (0, 2, 4)}) == 3


@pytest.mark.parametrize("logprob", [0.0, 1e-9, -math.inf, math.nan, -0.7])
def test_every_log_prob_has_a_colour(logprob: float) -> None:
    assert heat(logprob) in dict(HEAT).values()


def hostile_episode() -> ListedEpisode:
    trajectory = Trajectory(
        group_id=f"g{HOSTILE}",
        index=0,
        attempt=1,
        task_id=HOSTILE,
        purpose=Purpose.TRAIN,
        transcripts=(transcript(),),
        score=Score(1.0, {HOSTILE: 1.0}, detail=HOSTILE),
        sampling=SamplingParams(max_tokens=4),
        response_text=HOSTILE,
    )
    return ListedEpisode(
        *(trajectory.group_id, 0, 1, HOSTILE, Purpose.TRAIN, 1, 1.0),
        parts={HOSTILE: 1.0},
        answer=HOSTILE,
        text=HOSTILE,
        dropped=HOSTILE,
        trajectory=trajectory,
    )


def test_no_text_of_a_model_acts_on_the_terminal() -> None:
    def evil(tokens: Any) -> list[str]:
        return [HOSTILE for _ in tokens]

    each = hostile_episode()
    full = [episode_text(each, color=color, pieces=evil) for color in get_args(Colouring)]
    text = without_styles(shown(table_of([each]), *full))
    assert not acts(text)
    assert "␛]0;pwned" in text


def test_an_exported_episode_has_its_prompt_as_text() -> None:
    each = hostile_episode()
    assert each.trajectory is not None
    said = replace(each.trajectory, prompt_text="1+2=", response_text="3")
    exported = episode_json(replace(each, trajectory=said))
    assert (exported["prompt_text"], exported["completion_text"]) == ("1+2=", "3")
    several = replace(said, completion_text="3, really? 4")
    assert episode_json(replace(each, trajectory=several))["completion_text"] == "3, really? 4"
    assert "prompt_text" not in episode_json(replace(each, trajectory=None))


def test_samples_of_a_step_are_followed_wherever_their_names_put_them() -> None:
    def samples(*places: tuple[int, str]) -> list[ListedEpisode]:
        newest = sorted(places, reverse=True)
        return [ListedEpisode(name, 0, 1, "t", Purpose.TRAIN, step, 0.0) for step, name in newest]

    def shown(found: list[ListedEpisode], *, since: int, before: int = 0) -> list[str]:
        new = unseen_samples(found, seen, since=since, most=9, before=before)
        return [each.group_id for each in new]

    seen: set[tuple[str, int, int]] = set()
    stored = [(1, "a"), (2, "b"), (3, "g"), (3, "k")]
    assert shown(samples(*stored), since=3, before=3) == ["k", "g", "b"]
    stored += [(3, "c"), (3, "h"), (3, "z"), (4, "d")]
    assert shown(samples(*stored), since=3) == ["d", "z", "h", "c"]  # and nothing of before
    assert shown(samples(*stored), since=4) == []
    assert shown(samples(*stored, (2, "e")), since=2) == ["e"]  # the trainer has started again


def test_names_and_reasons_of_jobs_do_not_act_either() -> None:
    status = JobStatus(
        job_id=f"j{HOSTILE}", name=HOSTILE, tenant="a", state=JobState.QUEUED, reason=HOSTILE
    )
    job = JobActivity(status, held=True)
    process = ProcessActivity(HOSTILE, WorkerKind.REWARD)
    before, now = (Activity(at, (job,), (process,)) for at in (1.0, 2.0))
    found = attribute(before, now)
    assert found is not None
    assert not acts(without_styles(shown(screen(now, found))))
    assert as_json(now, found)["bottleneck"] == ""


def test_notebooks_escape_what_models_wrote() -> None:
    wicked = f"<script>alert(1)</script>{HOSTILE}"
    status = JobStatus(job_id=wicked, name=wicked, tenant="a", state=JobState.RUNNING)
    row = MetricRow(index=0, step=1, kind=Purpose.TRAIN, values={wicked: 1.0, "a": {"b": wicked}})
    page = MetricPage(rows=[row], next=0)
    for made in (JobView(status=status, spec={}), page, EpisodePage(episodes=[hostile_episode()])):
        html = made._repr_html_()  # pyright: ignore[reportPrivateUsage]
        assert "<script>" not in html
        assert not acts(html)
    assert "a.b" in page.to_pandas().columns
    (record,) = EpisodePage(episodes=[hostile_episode()]).records()
    assert record[f"parts.{HOSTILE}"] == 1.0


def test_pieces_of_tokens_join_to_their_text(tiny_model: Path) -> None:
    files = {path.name: path.read_bytes() for path in tiny_model.glob("*.json")}
    tokenizer = Tokenizer.from_files(files)
    tokens = tokenizer.encode("12+34=")
    assert "".join(tokenizer.pieces(tokens)) == "12+34="
    fast = FastTokenizer(WordLevel({"a": 0, "\x1b": 1}, unk_token="a"))
    own = Tokenizer(fast=fast, special={}, template="", eos=())
    text = transcript_text(transcript(), color="logprob", pieces=numbered)
    assert "".join(own.pieces([1])) == "\x1b"
    assert "0 1 " in text.plain


def rows() -> list[MetricRow]:
    def row(at: int, kind: Purpose, **values: Any) -> MetricRow:
        return MetricRow(index=at, step=at, kind=kind, values=values)

    return [
        row(1, Purpose.TRAIN, reward_mean=0.25, loss=1.0),
        row(2, Purpose.TRAIN, reward_mean=0.5, loss=0.5),
        row(1, Purpose.TRAIN, reward_mean=0.3, loss=0.9),  # trained again after a crash
        row(2, Purpose.EVAL, reward=0.4, complete=True),
        row(3, Purpose.EVAL, reward=0.9, complete=False),
        row(4, Purpose.EVAL, reward=0.1, set="hard"),
    ]


def test_curves_have_the_last_row_of_a_step_and_only_evals_that_count() -> None:
    found = {each.label: (each.steps, each.values) for each in metric_curves(rows(), "reward")}
    assert found == {
        "training": ((1, 2), (0.3, 0.5)),
        "held out": ((2,), (0.4,)),
        "held out: hard": ((4,), (0.1,)),
    }
    with pytest.raises(InvalidError, match=r"metric 'los' is in no row; there are .*loss"):
        metric_curves(rows(), "los")


@pytest.mark.parametrize("ending", [".png", ".svg", ".pdf"])
def test_a_plot_is_the_same_for_the_same_rows(tmp_path: Path, ending: str) -> None:
    paths = [tmp_path / f"{name}{ending}" for name in "ab"]
    for path in paths:
        save(figure({"a": rows(), "$x$": rows()}, ["reward", "loss"]), path)
    assert paths[0].stat().st_size > 1000
    if ending == ".png":
        assert paths[0].read_bytes() == paths[1].read_bytes()
    with pytest.raises(InvalidError, match=r"write \.png, \.svg, \.pdf"):
        save(figure({"a": rows()}), tmp_path / "c.gif")
