"""What of matplotlib's SVG goes into a page: the geometry. Colours, fonts and words come from elsewhere.

matplotlib repeats its style at every path, names groups and markers by chance or hash, and knows no class. Here each
artist, found by its number, becomes one short element with the class and the words it was drawn with.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

from fp8bench.report.drawing.labels import escaped

_SVG = "{http://www.w3.org/2000/svg}"
_HREF = "{http://www.w3.org/1999/xlink}href"
# Commands of a path -> the numbers that follow.
_NUMBERS = {"M": 2, "L": 2, "Q": 4, "C": 6, "z": 0}
_TURN = re.compile(r"rotate\((-?[\d.]+)")


@dataclass(frozen=True)
class Hint:
    """What a mark says: in short to a screen reader, at length on hovering. Without `stop` it cannot be tabbed to."""

    short: str
    full: str
    stop: bool = True


@dataclass(frozen=True)
class Ink:
    """What an artist is in the page: its class, its words if it is a text, its hint if it is a mark."""

    style: str
    text: str = ""
    anchor: str = "start"
    hint: Hint | None = None


def body(svg: str, inks: Sequence[Ink], name: str) -> str:
    """The elements of a drawing, in the order of their layers; artist number N carries the gid 'N'."""
    groups = {group.get("id"): group for group in ElementTree.fromstring(svg).iter(f"{_SVG}g")}
    markers: dict[str, str] = {}
    for path in (path for group in groups.values() for path in group.findall(f"{_SVG}defs/{_SVG}path")):
        markers.setdefault(f"#{path.get('id')}", f'<path id="{name}-m{len(markers)}" d="{_path(path.get("d", ""))}"/>')
    places = {key: f'href="#{name}-m{number}"' for number, key in enumerate(markers)}
    lines = [f"<defs>{''.join(markers.values())}</defs>"] if markers else []
    order = (group.get("id", "") for group in groups.values())
    lines += (_element(groups[one], inks[int(one)], places) for one in order if one.isdigit())
    return "\n".join(lines)


def _element(group: ElementTree.Element, ink: Ink, markers: dict[str, str]) -> str:
    """One artist as one element."""
    leaf = next(_leaves(group))
    if leaf.tag == f"{_SVG}text":
        return f"<text{_text_attributes(leaf, ink)}>{escaped(ink.text)}</text>"
    shape = f' d="{_path(leaf.get("d", ""))}"'
    if leaf.tag == f"{_SVG}use":
        shape = f' {markers[leaf.get(_HREF, "")]} x="{_rounded(leaf.get("x", "0"))}" y="{_rounded(leaf.get("y", "0"))}"'
    words = _words(ink.hint) if ink.hint else ""
    return f'<{leaf.tag.removeprefix(_SVG)} class="{ink.style}"{shape}{words}/>'


def _leaves(group: ElementTree.Element) -> Iterator[ElementTree.Element]:
    """What is drawn by a group, without what it only defines."""
    for child in group:
        if child.tag == f"{_SVG}g":
            yield from _leaves(child)
        elif child.tag != f"{_SVG}defs":
            yield child


def _text_attributes(leaf: ElementTree.Element, ink: Ink) -> str:
    x, y = _rounded(leaf.get("x", "0")), _rounded(leaf.get("y", "0"))
    style = f' class="{ink.style}"' if ink.style else ""
    anchor = f' text-anchor="{ink.anchor}"' if ink.anchor != "start" else ""
    turned = _TURN.search(leaf.get("transform", ""))
    angle = float(turned[1]) if turned else 0.0
    turn = f' transform="rotate({_rounded(str(angle))} {x} {y})"' if angle else ""
    return f'{style} x="{x}" y="{y}"{anchor}{turn}'


def _words(hint: Hint) -> str:
    """A mark can be reached by keyboard, and says what it is."""
    stop = f' tabindex="0" role="img" aria-label="{escaped(hint.short)}"' if hint.stop else ""
    return f'{stop} data-hint="{escaped(hint.full)}"'


def _path(data: str) -> str:
    """A path in as few letters as two decimals take: 'M 1 2 \\n L 3 2' becomes 'M1 2H3'."""
    words = data.split()
    parts: list[str] = []
    at, here = 0, ("", "")
    while at < len(words):
        command, count = words[at], _NUMBERS[words[at]]
        numbers = [_rounded(word) for word in words[at + 1 : at + 1 + count]]
        end = (numbers[-2], numbers[-1]) if numbers else here
        if command == "L" and end[1] == here[1]:
            parts.append(f"H{end[0]}")
        elif command == "L" and end[0] == here[0]:
            parts.append(f"V{end[1]}")
        else:
            parts.append(command + " ".join(numbers))
        at, here = at + 1 + count, end
    return "".join(parts)


def _rounded(number: str) -> str:
    """'3.10000' -> '3.1'."""
    text = f"{float(number):.2f}".rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text
