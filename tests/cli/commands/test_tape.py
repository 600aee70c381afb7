"""tape and show --tape from words to tables, rows and documents, in this process."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from tests.commands import Say, unfolded
from tests.kept import grid_run, keep

NOW = ("tape", "gemm", "--no-isolation", "--set", "shape=64", "--dtypes", "fp32,bf16")


def test_precisions_side_by_side(store: Path, fp8bench: Say) -> None:
    code, out, _ = fp8bench(*NOW)
    assert code == 0 and "declared" in out and "524 kFLOP, 48.0 KiB in 1  524 kFLOP, 24.0 KiB in 1" in out


def test_rows_have_the_shapes_of_operators(store: Path, fp8bench: Say) -> None:
    _, out, _ = fp8bench(*NOW, "--csv", "-")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [(row["tape"], row["operator"], row["flops"], row["path"]) for row in rows] == [
        (name, "mm", str(2 * 64**3), name) for name in ("fp32", "bf16")
    ]


def test_a_run_without_tapes_says_how_to_get_them(store: Path, fp8bench: Say) -> None:
    code, _, error = fp8bench("show", keep(grid_run(), store).id, "--tape")
    assert code == 2 and "has no tape" in unfolded(error) and "--tape" in error
