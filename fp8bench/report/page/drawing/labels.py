"""Places texts next to the marks of a chart, as many as fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from fp8bench.report.page.drawing.scale import LABELS, cut_to_room
from fp8bench.report.page.drawing.sheet import Sheet

# Longer labels are shortened in the middle.
_LABEL_ROOM = 190.0


@dataclass(frozen=True)
class Box:
    """A rectangle in pixels of the sheet, with y pointing down."""

    left: float
    top: float
    right: float
    bottom: float

    def meets(self, box: Box) -> bool:
        is_aside = self.left >= box.right or box.left >= self.right
        return not is_aside and self.top < box.bottom and box.top < self.bottom

    def holds(self, box: Box) -> bool:
        within_width = self.left <= box.left and box.right <= self.right
        return within_width and self.top <= box.top and box.bottom <= self.bottom


# A text's box, its anchor, and the position of the anchor.
Spot = tuple[Box, str, float]


def write_beside(
    sheet: Sheet,
    texts: Iterable[tuple[float, float, str, str]],
    taken: list[Box],
    frames: Sequence[Box],
    boxes_at: Callable[[float, float, float, float], Iterable[Spot]],
) -> None:
    """Writes texts (x, y, text, style) next to their positions, as many as fit."""
    written = 0
    for x, y, label, style in texts:
        if written == LABELS:
            return
        text = cut_to_room(label, _LABEL_ROOM, sheet.size)
        if not text:
            continue
        for box, anchor, place in boxes_at(x, y, sheet.measure(text), sheet.size):
            is_inside = any(frame.holds(box) for frame in frames)
            if is_inside and not any(map(box.meets, taken)):
                taken.append(box)
                sheet.text(place, (box.top + box.bottom) / 2, text, style, anchor=anchor)
                written += 1
                break


def boxes_over(x: float, y: float, wide: float, size: float) -> Iterable[Spot]:
    """Returns boxes for a label: above a mark, higher, and below it."""
    half = size * 0.6
    for lines in (-1, -2, -3, -4, 1, 2, 3):
        middle = y + lines * size * 1.25
        top = middle - half
        bottom = middle + half
        yield Box(x - wide / 2, top, x + wide / 2, bottom), "middle", x
        yield Box(x, top, x + wide, bottom), "start", x
        yield Box(x - wide, top, x, bottom), "end", x


def boxes_around(x: float, y: float, wide: float, size: float) -> Iterable[Spot]:
    half = size * 0.6
    yield Box(x + 9, y - half, x + 9 + wide, y + half), "start", x + 9
    yield Box(x - 9 - wide, y - half, x - 9, y + half), "end", x - 9
    for middle in (y - 15, y + 15):
        yield Box(x - wide / 2, middle - half, x + wide / 2, middle + half), "middle", x
