"""A picture of latency against load, as SVG: two panels, times to first token and times per output token."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

WIDTH, HEIGHT = 960, 460
_TOP, _BOTTOM, _LEFT, _GAP, _PANEL = 112, 396, 72, 90, 380
_TICKS = 5
_LONGEST = {15: 105, 11: 140}
"""Characters of a line over the whole width, by font size."""
_COLOURS = (("#1b6ca8", "#6cb6f0"), ("#b4530a", "#f2a65a"), ("#7a3e9d", "#cf9be8"), ("#2e7d4f", "#7fd3a1"))
"""Of lines, on light and on dark; neighbours differ in lightness too."""
_INK, _FAINT, _PAPER = ("#1c1f23", "#e8eaed"), ("#d5d9de", "#3c4148"), ("#ffffff", "#15181c")


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a panel.

    Args:
        name: in the legend. points: (output tokens per second, milliseconds) in the order of the loads.
    """

    name: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel: what its vertical axis shows, and its lines, which share the loads."""

    title: str
    lines: tuple[Line, ...]


@dataclass(frozen=True, slots=True)
class _Axis:
    """A linear axis from 0 to ``end``, drawn from pixel ``low`` to pixel ``high``."""

    end: float
    step: float
    low: float
    high: float

    def place(self, value: float) -> float:
        return round(self.low + (self.high - self.low) * value / self.end, 2)

    def ticks(self) -> list[float]:
        return [step * self.step for step in range(round(self.end / self.step) + 1)]


def draw(title: str, note: str, panels: Sequence[Panel], labels: Sequence[str]) -> str:
    """Return the SVG text of up to two panels.

    Args:
        note: a line below the title. labels: what the load was at each point, written above the last line's points.
    """
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="system-ui, sans-serif" font-size="12" role="img" aria-label={quoteattr(title)}>',
        f"<style>{_style()}</style>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" class="paper" fill="{_PAPER[0]}"/>',
        _text(_LEFT - 40, 26, _cut(title, 15), size=15),
        _text(_LEFT - 40, 44, _cut(note, 11), size=11),
    ]
    for place, panel in enumerate(panels):
        parts += _panel(panel, _LEFT + place * (_PANEL + _GAP), labels)
    return "\n".join([*parts, "</svg>", ""])


def _style() -> str:
    """Return the colours on dark; those on light are attributes, for viewers that know no style sheets."""
    rules = [f".c{n} {{ stroke: {dark} }} .m{n} {{ fill: {dark} }}" for n, (_, dark) in enumerate(_COLOURS)]
    rules += [f".paper {{ fill: {_PAPER[1]} }} .ink {{ fill: {_INK[1]} }} .faint {{ stroke: {_FAINT[1]} }}"]
    rules += [f".halo {{ stroke: {_PAPER[1]} }}"]
    return f"@media (prefers-color-scheme: dark) {{ {' '.join(rules)} }}"


def _panel(panel: Panel, left: float, labels: Sequence[str]) -> Iterator[str]:
    points = [point for line in panel.lines for point in line.points]
    across = _axis(max((x for x, _ in points), default=0), left, left + _PANEL)
    up = _axis(max((y for _, y in points), default=0), _BOTTOM, _TOP)
    yield from _grid(across, up)
    yield _text(left, _TOP - 30, panel.title, size=13)
    yield _text(left + _PANEL / 2, _BOTTOM + 40, "output tokens per second", anchor="middle")
    yield _text(left - 46, (_TOP + _BOTTOM) / 2, "milliseconds", anchor="middle", turned=True)
    for place, line in enumerate(panel.lines):
        yield from _line(line, place, across, up)
        yield from _legend(line.name, place, left + place * 92)
    for (x, y), label in zip(panel.lines[-1].points if panel.lines else (), labels, strict=False):
        yield _label(across.place(x), up.place(y) - 10, label)


def _grid(across: _Axis, up: _Axis) -> Iterator[str]:
    for value in up.ticks():
        y = up.place(value)
        yield _rule(across.low, y, across.high, y)
        yield _text(across.low - 8, y + 4, _number(value), anchor="end", size=11)
    for value in across.ticks():
        x = across.place(value)
        yield _rule(x, up.low, x, up.low + 5)
        yield _text(x, up.low + 20, _number(value), anchor="middle", size=11)


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" class="faint" stroke="{_FAINT[0]}"/>'


def _line(line: Line, place: int, across: _Axis, up: _Axis) -> Iterator[str]:
    number = place % len(_COLOURS)
    colour = _COLOURS[number][0]
    spots = [(across.place(x), up.place(y)) for x, y in line.points]
    path = " ".join(f"{x},{y}" for x, y in spots)
    yield f'<polyline points="{path}" fill="none" class="c{number}" stroke="{colour}" stroke-width="2"/>'
    for (x, y), (rate, ms) in zip(spots, line.points, strict=True):
        hint = escape(f"{line.name}: {ms:g} ms at {rate:g} tokens/s")
        yield f'<circle cx="{x}" cy="{y}" r="3.5" class="m{number}" fill="{colour}"><title>{hint}</title></circle>'


def _legend(name: str, place: int, x: float) -> Iterator[str]:
    number = place % len(_COLOURS)
    colour = _COLOURS[number][0]
    yield f'<rect x="{x}" y="{_TOP - 20}" width="14" height="4" class="m{number}" fill="{colour}"/>'
    yield _text(x + 19, _TOP - 14, name, size=11)


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, turned: bool = False) -> str:
    turn = f' transform="rotate(-90 {x} {y})"' if turned else ""
    style = f'class="ink" fill="{_INK[0]}" font-size="{size}" text-anchor="{anchor}"'
    return f'<text x="{x}" y="{y}" {style}{turn}>{escape(text)}</text>'


def _label(x: float, y: float, text: str) -> str:
    """Return a text that can be read where lines cross it: it has a rim of the ground's colour."""
    rim = f'class="ink halo" fill="{_INK[0]}" stroke="{_PAPER[0]}" stroke-width="4" paint-order="stroke"'
    style = 'stroke-linejoin="round" font-size="11" font-weight="600" text-anchor="middle"'
    return f'<text x="{x}" y="{y}" {rim} {style}>{escape(text)}</text>'


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:g}"


def _cut(text: str, size: int) -> str:
    longest = _LONGEST[size]
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def _axis(most: float, low: float, high: float) -> _Axis:
    """Return an axis that holds ``most``, with ticks at round numbers (1, 2 or 5 times a power of ten)."""
    rough = (most if most > 0 else 1.0) / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    return _Axis(step * max(1, math.ceil(most / step - 1e-9)), step, low, high)
