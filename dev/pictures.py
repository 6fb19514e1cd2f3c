"""Draws the pictures of docs/concepts.md as SVG: nothing is loaded to show them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from paceline.enums import EPISODE_TRANSITIONS, EpisodeState

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "pictures"
BLUE, GREEN, ORANGE, GREY = "#dbe7f5", "#dff0e0", "#fdebd0", "#eeeeee"
LINE, TEXT, FAINT = "#4c78a8", "#222222", "#777777"
Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Box:
    """A box with a title and a smaller line below it; x and y are those of its centre."""

    x: float
    y: float
    title: str
    text: str = ""
    fill: str = BLUE
    width: float = 150
    height: float = 48

    def edge(self, towards: Point) -> Point:
        """Where a line from its centre leaves it."""
        dx, dy = towards[0] - self.x, towards[1] - self.y
        across = self.width / 2 / abs(dx) if dx else float("inf")
        down = self.height / 2 / abs(dy) if dy else float("inf")
        share = min(across, down, 1.0)
        return self.x + dx * share, self.y + dy * share

    def draw(self) -> Iterator[str]:
        """Its shapes."""
        left, top = self.x - self.width / 2, self.y - self.height / 2
        yield (
            f'<rect x="{left:g}" y="{top:g}" width="{self.width:g}" height="{self.height:g}" '
            f'rx="6" fill="{self.fill}" stroke="{LINE}"/>'
        )
        y = self.y - 3 if self.text else self.y + 5
        yield _text(self.x, y, self.title, bold=True)
        if self.text:
            yield _text(self.x, self.y + 14, self.text, size=11, colour=FAINT)


def files() -> dict[Path, str]:
    """Path and content of the pictures."""
    pictures = {"services": services(), "staleness": staleness(), "ledger": ledger()}
    return {FOLDER / f"{name}.svg": text for name, text in pictures.items()}


def services() -> str:
    """The services, and the way of an episode through them by number."""
    gateway = Box(110, 40, "gateway", "REST, gRPC, jobs")
    controller = Box(590, 40, "controller", "starts, scales, restarts")
    experience = Box(350, 140, "experience", "the ledger of all episodes", ORANGE, 630)
    environment = Box(110, 260, "environment", "tasks and worlds", GREEN)
    rollout = Box(350, 260, "rollout", "tokens in, tokens out", GREEN)
    trainer = Box(590, 260, "trainer", "optimiser steps", GREEN)
    reward = Box(110, 370, "reward", "scores", GREEN)
    parts = [
        *_arrow((110, 64), (110, 116), "submit", at=(60, 94)),
        *_arrow((590, 116), (590, 64), "jobs, demand", at=(640, 94)),
        *_arrow((80, 164), (80, 236), "1 lease", at=(44, 204)),
        *_arrow((140, 236), (140, 164), "4 submit", at=(182, 204)),
        *_arrow((185, 253), (275, 253), "2 prompt", at=(230, 246)),
        *_arrow((275, 268), (185, 268), "tokens", at=(230, 284)),
        *_arrow((110, 284), (110, 346), "3 response, score", at=(174, 320)),
        *_arrow((560, 164), (560, 236), "5 batch", at=(524, 204)),
        *_arrow((620, 236), (620, 164), "6 step", at=(656, 204)),
        *_arrow((515, 260), (425, 260), "7 weights", at=(470, 252)),
        *_arrow((350, 164), (350, 236), "versions, routes", at=(404, 204)),
    ]
    boxes = (gateway, controller, experience, environment, rollout, trainer, reward)
    return _svg(700, 410, [*parts, *(line for box in boxes for line in box.draw())])


STALENESS_NOTES = (
    "Step 2 trains on A to D; E follows in step 3. The oldest token of A and B is from version 0,",
    "two steps before step 2: their staleness is 2, that of C and D is 1. With max_staleness: 1,",
    "A and B would have been admitted one step later, when newer weights were there.",
)
EPISODES = ((170, 300), (240, 480), (350, 500), (400, 506), (450, 640))  # from, to


def staleness() -> str:
    """Episodes while weights change below them, and the step that trains on them."""
    parts = [_text(20, 24, "rollout samples", anchor="start", bold=True)]
    colours = (BLUE, GREEN, ORANGE)
    for version, colour in enumerate(colours):
        x = 150 + 180 * version
        parts.append(f'<rect x="{x}" y="40" width="176" height="30" fill="{colour}"/>')
        parts.append(_text(x + 88, 60, f"with version {version}"))
    for row, (start, end) in enumerate(EPISODES):
        y = 92 + 24 * row
        parts.append(_text(20, y + 5, f"episode {'ABCDE'[row]}", anchor="start"))
        parts += _episode(start, end, y, colours)
    parts.append(_text(20, 236, "trainer", anchor="start", bold=True))
    for step in range(3):
        x = 330 + 180 * step
        parts.append(
            f'<rect x="{x - 176}" y="220" width="172" height="26" fill="{GREY}" stroke="#bbb"/>'
        )
        parts.append(_text(x - 90, 238, f"step {step}"))
        if step < 2:
            parts += _arrow((x, 218), (x, 74), "")
    for line, note in enumerate(STALENESS_NOTES):
        parts.append(_text(20, 272 + 18 * line, note, anchor="start", size=12))
    return _svg(710, 322, parts)


def _episode(start: int, end: int, y: int, colours: Sequence[str]) -> Iterator[str]:
    """A bar with the colours of the versions that sampled its tokens."""
    for version, colour in enumerate(colours):
        left, right = max(start, 150 + 180 * version), min(end, 330 + 180 * version)
        if left < right:
            yield (
                f'<rect x="{left}" y="{y - 8}" width="{right - left}" height="16" '
                f'fill="{colour}" stroke="{LINE}"/>'
            )


PLACES = {
    EpisodeState.QUEUED: (80, 60),
    EpisodeState.LEASED: (220, 60),
    EpisodeState.FINISHED: (360, 60),
    EpisodeState.READY: (500, 60),
    EpisodeState.TAKEN: (640, 60),
    EpisodeState.TRAINED: (780, 60),
    EpisodeState.DURABLE: (920, 60),
    EpisodeState.MEASURED: (220, 190),
    EpisodeState.DROPPED: (570, 190),
}
ABOUT = {
    EpisodeState.QUEUED: "admitted",
    EpisodeState.LEASED: "a worker runs it",
    EpisodeState.FINISHED: "scored",
    EpisodeState.READY: "group complete",
    EpisodeState.TAKEN: "in a batch",
    EpisodeState.TRAINED: "step committed",
    EpisodeState.DURABLE: "in a checkpoint",
    EpisodeState.MEASURED: "of an evaluation",
    EpisodeState.DROPPED: "with a reason",
}


def ledger() -> str:
    """The states of an episode, with every transition that the ledger allows."""
    boxes = {
        state: Box(x, y, state.value, ABOUT[state], _fill(state), 112)
        for state, (x, y) in PLACES.items()
    }
    parts: list[str] = []
    for state, following in EPISODE_TRANSITIONS.items():
        for after in sorted(following):
            parts += _transition(boxes[state], boxes[after])
    return _svg(1000, 230, [*parts, *(line for box in boxes.values() for line in box.draw())])


def _transition(before: Box, after: Box) -> Iterator[str]:
    if after.x < before.x and after.y == before.y:  # back, above the boxes
        left, right, top = after.x + 20, before.x - 20, after.y - 24
        yield (
            f'<path d="M{right:g} {top:g}C{right:g} 8,{left:g} 8,{left:g} {top - 3:g}" '
            f'fill="none" stroke="{LINE}" marker-end="url(#tip)"/>'
        )
        return
    if after.y > before.y and after.x != before.x:  # down, spread along the upper side
        place = after.x + (before.x - after.x) / 9
        start = (before.x, before.y + before.height / 2)
        yield from _arrow(start, (place, after.y - after.height / 2), "")
        return
    start, end = before.edge((after.x, after.y)), after.edge((before.x, before.y))
    yield from _arrow(start, end, "")


def _fill(state: EpisodeState) -> str:
    if state is EpisodeState.DROPPED:
        return ORANGE
    return BLUE if EPISODE_TRANSITIONS[state] else GREEN


def _arrow(start: Point, end: Point, text: str, *, at: Point = (0, 0)) -> Iterator[str]:
    yield (
        f'<path d="M{start[0]:g} {start[1]:g}L{end[0]:g} {end[1]:g}" '
        f'stroke="{LINE}" marker-end="url(#tip)"/>'
    )
    if text:
        yield _text(*at, text, size=12)


def _text(
    x: float,
    y: float,
    text: str,
    *,
    size: int = 13,
    colour: str = TEXT,
    anchor: str = "middle",
    bold: bool = False,
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{colour}" '
        f'text-anchor="{anchor}"{weight}>{escape(text)}</text>'
    )


def _svg(width: int, height: int, parts: Sequence[str]) -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            'font-family="sans-serif">',
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            f'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="{LINE}"/></marker>'
            "</defs>",
            f'<rect width="{width}" height="{height}" fill="white"/>',
            *parts,
            "</svg>\n",
        ]
    )
