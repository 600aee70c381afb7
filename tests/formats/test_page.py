"""docs/formats.md says of scalings and of noise what the code says."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from fp8bench.errors import UsageError
from fp8bench.formats.grids import E4M3, E8M0, Overflow
from fp8bench.formats.quantise import round_to
from fp8bench.formats.recipes import ScaleRounding, Scaling
from tests.formats.test_noise import FIGURES

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "formats.md").read_text()


def table(title: str) -> tuple[list[str], list[list[str]]]:
    """The header and the rows of the first table below a title."""
    lines = PAGE.split(f"\n## {title}\n")[1].splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("|"))
    cells = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        cells.append([cell.strip() for cell in line.strip("|").split("|")])
    return cells[0], cells[2:]


def test_what_the_page_says_of_overflow_and_ties() -> None:
    at, tie, over = round_to(torch.tensor([463.9, 464.0, 464.1]), E4M3, overflow=Overflow.NAN).tolist()
    assert (at, tie) == (448, 448)
    assert math.isnan(over)
    assert round_to(torch.tensor([1.5, 3.0, 1e-45]), E8M0).tolist() == [2.0, 4.0, 2.0**-127]


def test_the_scalings_take_the_roundings_that_are_named_and_no_others() -> None:
    _, rows = table("Scalings")
    blocks = {"all": [(0, 0)], "a row": [(1, 0)], "1 x 16 or 16 x 16": [(1, 16), (16, 16)]}
    for name, block, kept, roundings in rows:
        scale = {"float32": None, "e8m0": E8M0}.get(kept, E4M3)
        named = roundings.split(", ")
        for rows_of_block, columns in blocks.get(block) or [tuple(map(int, block.split(" x ")))]:
            for rounding in ScaleRounding:
                if rounding in named:
                    Scaling(rows_of_block, columns, scale, rounding)
                else:
                    with pytest.raises(UsageError, match="are not rounded by"):
                        Scaling(rows_of_block, columns, scale, rounding)
        assert name


def test_the_noise_is_what_the_tests_hold_it_to() -> None:
    lines = PAGE.split("\nWhat that costs Gaussian values")[1].splitlines()
    header, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")
    ]  # fmt: skip
    shown = {
        (row[0].strip("`"), column): float(cell)
        for row in rows[:5]
        for column, cell in zip(header[1:], row[1:], strict=True)
        if cell
    }
    columns = {(0, None): "tensor", (1, E4M3): "NVFP4"}
    held = {
        (fmt.name, columns.get((scaling.rows, scaling.scale), str(scaling.rounding))): figure
        for fmt, scaling, figure in FIGURES
    }
    assert shown == held
