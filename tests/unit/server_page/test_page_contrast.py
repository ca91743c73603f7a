"""Colours can be told apart, by the formula of WCAG 2.2."""

from __future__ import annotations

import re

import pytest

from jackfield.server.page.document import STYLES, read_static

SCHEMES = ("light", "dark")
TEXTS = [
    *[(text, ground) for text in ("ink", "soft", "accent", "error") for ground in ("paper", "panel")],
    ("on-accent", "accent"),
    *[("ink", f"tint-{level}") for level in (1, 2, 3, 4)],
]
"""Colours of text, and what lies below."""
SHAPES = [(shape, ground) for shape in ("edge", "accent", "second") for ground in ("paper", "panel")]
"""Borders of controls, the ring around what has the focus, and lines of charts."""


def colours() -> dict[str, tuple[str, str]]:
    """Return the colours of both schemes, by name."""
    found = re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\);", read_static("base.css"))
    return {name: (light, dark) for name, light, dark in found}


def luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_the_formula_gives_known_values() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21.0)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_texts_have_a_contrast_of_at_least_4_5(scheme: str) -> None:
    place, all_colours = SCHEMES.index(scheme), colours()
    ratios = {pair: contrast(*(all_colours[name][place] for name in pair)) for pair in TEXTS}
    assert {pair: round(ratio, 2) for pair, ratio in ratios.items() if ratio < 4.5} == {}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_shapes_have_a_contrast_of_at_least_3(scheme: str) -> None:
    place, all_colours = SCHEMES.index(scheme), colours()
    ratios = {pair: contrast(*(all_colours[name][place] for name in pair)) for pair in SHAPES}
    assert {pair: round(ratio, 2) for pair, ratio in ratios.items() if ratio < 3.0} == {}


def test_every_colour_has_a_name_and_both_schemes() -> None:
    text = "\n".join(read_static(name) for name in STYLES)
    used = set(re.findall(r"var\(--([\w-]+)\)", text)) - {"sans", "mono"}
    assert used == set(colours())
    assert re.findall(r"#[0-9a-fA-F]{3,8}\b(?=[;, )])", re.sub(r"light-dark\([^)]*\)", "", text)) == []
