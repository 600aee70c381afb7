"""Texts of a chart: how wide they come out, how they are shortened, what XML cannot hold, and what a mark says.

The page sets them in the reader's own font, so widths are those of a wide one (DejaVu Sans).
"""

from __future__ import annotations

import html
import math
import re
import unicodedata
from dataclasses import dataclass
from itertools import accumulate

from fp8bench.report.elements import Mark
from fp8bench.report.page.drawing.limits import drawable
from fp8bench.report.page.drawing.scale import shown

ELLIPSIS = "\u2026"

# Widths in units of the font's size; what is not named is as wide as a digit.
_WIDTHS = {
    **dict.fromkeys("ijl'", 0.3),
    **dict.fromkeys(" .,:;/\\|IJ", 0.34),
    **dict.fromkeys("ft()[]r-!", 0.41),
    **dict.fromkeys('"`*?_', 0.53),
    **dict.fromkeys("cszLF", 0.58),
    **dict.fromkeys("ABCKPRVXYZ", 0.7),
    **dict.fromkeys("DGHNOQU&", 0.79),
    **dict.fromkeys("w=+<>#~^\u00d7\u00b1", 0.84),
    **dict.fromkeys("mMW%@\u2026\u2014", 1.0),
}
_DIGIT = 0.64
_OTHER = 0.75
_WIDE = 1.3
_BOLD = 1.21
# Control characters, halves of surrogate pairs and non-characters have no place in XML or HTML, not even escaped. Marks
# that turn the order of letters round would make a name read as another.
FORBIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)
_SPACES = re.compile(r"\s+")


@dataclass(frozen=True)
class Hint:
    """What a mark says: in short to a screen reader, at length on hovering. Without `stop` it cannot be tabbed to."""

    short: str
    full: str
    stop: bool = True


def width(text: str, size: float, bold: bool = False) -> float:
    return sum(_letter(letter) for letter in text) * size * (_BOLD if bold else 1.0)


def _letter(letter: str) -> float:
    if letter.isascii() or letter in _WIDTHS:
        return _WIDTHS.get(letter, _DIGIT)
    if unicodedata.combining(letter) or unicodedata.category(letter) in ("Cf", "Mn", "Me"):
        return 0.0
    return _WIDE if unicodedata.east_asian_width(letter) in "WF" else _OTHER


def shortened(text: str, room: float, size: float, bold: bool = False) -> str:
    """One line of at most `room` pixels: what is too much goes from the middle, as ends tell names apart."""
    text = _SPACES.sub(" ", text).strip()
    if width(text, size, bold) <= room + 0.01:
        return text
    kept = max(0.0, room - width(ELLIPSIS, size, bold))
    tail = _fitting(text[::-1], kept / 2, size, bold)
    head = _fitting(text, kept - width(text[len(text) - tail :], size, bold), size, bold)
    return text[:head].rstrip() + ELLIPSIS + text[len(text) - tail :].lstrip()


def _fitting(text: str, room: float, size: float, bold: bool) -> int:
    return sum(used <= room for used in accumulate(width(letter, size, bold) for letter in text))


def escaped(text: str) -> str:
    """A text as it may stand in XML and HTML, between tags and in quotes; line ends survive in an attribute."""
    clean = FORBIDDEN.sub("\ufffd", text.replace("\r\n", "\n").replace("\r", "\n"))
    return html.escape(clean, quote=True).replace("\n", "&#10;")


def ends(mark: Mark, log: bool = False) -> list[float]:
    found = [value for value in (mark.low, mark.high) if value is not None and drawable(value, log)]
    return sorted(found) if len(found) == 2 else []


def hint(mark: Mark, unit: str, *names: str) -> Hint:
    """'name, label: 0.512x [0.508x, 0.515x]', then the mark's own words on a line of their own."""
    text = shown(mark.value, unit)
    if mark.low is not None and mark.high is not None and math.isfinite(mark.low) and math.isfinite(mark.high):
        text += f" [{shown(mark.low, unit)}, {shown(mark.high, unit)}]"
    return worded(", ".join(dict.fromkeys(name for name in (*names, mark.label) if name)), text, mark.hint)


def worded(name: str, said: str, words: str = "", stop: bool = True) -> Hint:
    """'name: said', and on hovering the words below it, unless they say the same."""
    short = f"{name}: {said}" if name else said
    return Hint(short, short if words in ("", short) else f"{short}\n{words}", stop)
