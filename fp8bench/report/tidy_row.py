"""What a tidy row is: a cell for each column, by name."""

from __future__ import annotations

from fp8bench.model import Scalar

Cell = Scalar | None
TidyRow = dict[str, Cell]

STEP = "step"
