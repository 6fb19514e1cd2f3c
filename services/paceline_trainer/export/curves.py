"""Curves of a job's rewards as a small SVG, for its model card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

Points = Sequence[tuple[float, float]]
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 640, 320, 60, 40, 30, 20
COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756")
MAX_POINTS = 400


def draw(series: Mapping[str, Points], *, title: str) -> str:
    """Lines over trainer steps, each with its name; axes span all points."""
    shown = {name: thinned(points) for name, points in series.items() if points}
    xs = [x for points in shown.values() for x, _ in points] or [0.0]
    ys = [y for points in shown.values() for _, y in points] or [0.0]
    (x_min, x_max), (y_min, y_max) = _span(xs), _span(ys)

    def at(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (x - x_min) / (x_max - x_min) * (WIDTH - LEFT - RIGHT)
        down = HEIGHT - BOTTOM - (y - y_min) / (y_max - y_min) * (HEIGHT - BOTTOM - TOP)
        return round(across, 1), round(down, 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="18" font-size="14">{escape(title)}</text>',
    ]
    for part in range(5):
        y = y_min + part / 4 * (y_max - y_min)
        _, down = at(x_min, y)
        parts.append(f'<path d="M{LEFT} {down}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{down + 4}" text-anchor="end">{y:.3g}</text>')
    for anchor, x in (("start", x_min), ("end", x_max)):
        across, _ = at(x, y_min)
        parts.append(
            f'<text x="{across}" y="{HEIGHT - 22}" text-anchor="{anchor}">step {x:g}</text>'
        )
    for points, colour in zip(shown.values(), COLOURS, strict=False):
        line = " ".join(f"{across},{down}" for across, down in (at(x, y) for x, y in points))
        parts.append(
            f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
        )
        parts += [
            f'<circle cx="{at(*each)[0]}" cy="{at(*each)[1]}" r="2" fill="{colour}"/>'
            for each in points
            if len(points) <= 40
        ]
    for index, (name, colour) in enumerate(zip(shown, COLOURS, strict=False)):
        x = LEFT + index * 130
        parts.append(f'<rect x="{x}" y="{HEIGHT - 14}" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{x + 14}" y="{HEIGHT - 5}">{escape(name[:18])}</text>')
    return "\n".join([*parts, "</svg>", ""])


def thinned(points: Points) -> Points:
    """At most `MAX_POINTS` of them, the last one included."""
    stride = -(-len(points) // MAX_POINTS)
    return points if stride <= 1 else [*points[:-1:stride], points[-1]]


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)
