"""The colours of page and charts, in light and dark: each has a name, and contrast with what it stands on."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.counts import for_each

FOLDER = Path(__file__).resolve().parents[3] / "fp8bench" / "report" / "page"
PAGE, CHARTS = ((FOLDER / name).read_text() for name in ("style.css", "drawing/charts.css"))


def variables(style: str) -> list[dict[str, str]]:
    blocks = re.findall(r":root \{([^}]*#[^}]*)\}", style)[:2]
    light, dark = (dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block)) for block in blocks)
    return [light, light | dark]


def luminance(colour: str) -> float:
    """Relative luminance, as WCAG defines it."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first: str, other: str) -> float:
    darker, lighter = sorted((luminance(first), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def mixed(colour: str, under: str, share: float) -> str:
    pairs = ((int(colour[at : at + 2], 16), int(under[at : at + 2], 16)) for at in (1, 3, 5))
    return "#" + "".join(f"{round(share * over + (1 - share) * below):02x}" for over, below in pairs)


def poor(colours: dict[str, str], pairs: Iterable[tuple[str, str, float]]) -> dict[tuple[str, str], float]:
    contrasts = {(name, ground): (contrast(colours[name], colours[ground]), least) for name, ground, least in pairs}
    return {pair: ratio for pair, (ratio, least) in contrasts.items() if ratio < least}


@for_each("mode", [0, 1])
def test_contrast(mode: int) -> None:
    """WCAG AA: 4.5 for text on every ground it stands on, 3 for what is drawn."""
    assert contrast("#000000", "#ffffff") == pytest.approx(21)  # by definition; a grey of WCAG's own just misses AA
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)
    page, own = variables(PAGE)[mode], variables(CHARTS)[mode]
    assert page["ink"] != variables(PAGE)[1 - mode]["ink"]
    texts, series = ("ink", "muted", "accent", "good", "bad", "doubt"), [f"series-{number}" for number in range(1, 9)]
    pairs = [(name, ground, 4.5) for name in texts for ground in ("paper", "raised", "sunken", "wash")]
    pairs += [("paper", "ink", 4.5)]  # tooltips are the other way round
    assert not poor(
        page, pairs + [(name, "paper", 3.0) for name in series] + [(name, "raised", 4.45) for name in series]
    )
    assert not poor({**own, "ink": page["ink"]}, [("ink", name, 4.5) for name in own])
    for name in ("good", "bad", "series-1"):
        assert contrast(mixed(page[name], page["raised"], 0.75), page["raised"]) >= 3
    known = {name for style in (PAGE, CHARTS) for name in re.findall(r"--([\w-]+):", style)}
    assert set(re.findall(r"var\(--([\w-]+)", CHARTS)) <= known
