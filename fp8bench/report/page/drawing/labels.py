"""Writes texts next to the marks of a chart, as many as fit without overlap."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from fp8bench.report.page.drawing.scale import MAX_LABELS
from fp8bench.report.page.drawing.sheet import ChartSheet

# A label that is wider than this, in pixels, is shortened in the middle.
_MAX_LABEL_WIDTH = 190.0


@dataclass(frozen=True)
class PixelRectangle:
    """A rectangle in pixels of the sheet. y points down."""

    left: float
    top: float
    right: float
    bottom: float

    def overlaps_box(self, box: PixelRectangle) -> bool:
        is_side_by_side = self.left >= box.right or box.left >= self.right
        return not is_side_by_side and self.top < box.bottom and box.top < self.bottom

    def contains(self, box: PixelRectangle) -> bool:
        fits_width = self.left <= box.left and box.right <= self.right
        return fits_width and self.top <= box.top and box.bottom <= self.bottom


# The box of a text, its anchor (start, middle or end), and the x position of the anchor.
TextPosition = tuple[PixelRectangle, str, float]


def write_labels(
    sheet: ChartSheet,
    texts: Iterable[tuple[float, float, str, str]],
    occupied_boxes: list[PixelRectangle],
    frames: Sequence[PixelRectangle],
    find_boxes: Callable[[float, float, float, float], Iterable[TextPosition]],
) -> None:
    """Writes texts (x, y, text, style) near their positions, as many as fit without overlap.

    `find_boxes` proposes boxes for a text. The text is written in the first box that is free and lies within a frame.
    """
    num_written_labels = 0
    for x, y, label, style in texts:
        if num_written_labels == MAX_LABELS:
            return
        text = sheet.cut_to_width(label, _MAX_LABEL_WIDTH)
        if not text:
            continue
        for box, anchor, anchor_x in find_boxes(x, y, sheet.measure_text_width(text), sheet.font_size):
            is_box_inside_frame = any(frame.contains(box) for frame in frames)
            if is_box_inside_frame and not any(map(box.overlaps_box, occupied_boxes)):
                occupied_boxes.append(box)
                sheet.add_text(anchor_x, (box.top + box.bottom) / 2, text, style, anchor=anchor)
                num_written_labels += 1
                break


def iterate_vertical_label_boxes(x: float, y: float, width: float, size: float) -> Iterable[TextPosition]:
    """Yields possible boxes for the label of a mark, the preferred ones first: one to four lines above the mark, then
    one to three lines below it.
    """
    half_text_height = size * 0.6
    for lines in (-1, -2, -3, -4, 1, 2, 3):
        text_middle_y = y + lines * size * 1.25
        top, bottom = text_middle_y - half_text_height, text_middle_y + half_text_height
        yield PixelRectangle(x - width / 2, top, x + width / 2, bottom), "middle", x
        yield PixelRectangle(x, top, x + width, bottom), "start", x
        yield PixelRectangle(x - width, top, x, bottom), "end", x


def iterate_point_label_boxes(x: float, y: float, width: float, size: float) -> Iterable[TextPosition]:
    half_height = size * 0.6
    # Prefer the right side of the point, then the left side, then above and below it.
    yield PixelRectangle(x + 9, y - half_height, x + 9 + width, y + half_height), "start", x + 9
    yield PixelRectangle(x - 9 - width, y - half_height, x - 9, y + half_height), "end", x - 9
    for middle_y in (y - 15, y + 15):
        yield PixelRectangle(x - width / 2, middle_y - half_height, x + width / 2, middle_y + half_height), "middle", x
