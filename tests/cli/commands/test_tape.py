"""tape and show --tape from words to tables, rows and documents, in this process."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

from fp8bench.model import OperatorCount, PhaseCount, Record, Status, Tape, Work
from tests.commands import Say, unfolded
from tests.kept import grid_run, keep
from tests.runs import NATIVE, case, run_of

NOW = ("tape", "gemm", "--no-isolation", "--set", "shape=64", "--dtypes", "fp32,bf16")
PARAMS = {"m": 64, "n": 64, "k": 64, "product": "forward", "operands": "cast"}
FLOPS = 2 * 64**3
PRODUCT = OperatorCount("gemm", "mm", inputs=("fp32[64,64]",) * 2, flops=FLOPS, bytes=3 * 64 * 64 * 4, path="fp32")


def kept(store: Path, *operators: OperatorCount) -> str:
    count = PhaseCount(
        "gemm", sum(operator.flops or 0 for operator in operators), sum(operator.bytes for operator in operators)
    )
    tape = Tape(operators, (count,)) if operators else None
    one = Record(case("gemm", "fp32", dict(PARAMS)), NATIVE, Status.OK, Work(flops=FLOPS), True, tape=tape)
    return keep(replace(grid_run(), plan=run_of([one]).plan, records=(one,)), store).id


def test_precisions_side_by_side(store: Path, fp8bench: Say) -> None:
    code, out, _ = fp8bench(*NOW)
    assert code == 0 and "declared" in out and "524 kFLOP, 48.0 KiB in 1  524 kFLOP, 24.0 KiB in 1" in out


def test_rows_and_documents(store: Path, fp8bench: Say) -> None:
    _, out, _ = fp8bench(*NOW, "--csv", "-")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [(row["tape"], row["operator"], row["flops"], row["path"]) for row in rows] == [
        (name, "mm", str(FLOPS), name) for name in ("fp32", "bf16")
    ]
    _, out, _ = fp8bench(*NOW, "--json")
    assert [tape["tape"]["phases"][0]["flops"] for tape in json.loads(out)["tapes"]] == [FLOPS, FLOPS]


def test_a_run_without_tapes_says_how_to_get_them(store: Path, fp8bench: Say) -> None:
    code, _, error = fp8bench("show", kept(store), "--tape")
    assert code == 2 and "has no tape" in unfolded(error) and "--tape" in error


def test_a_stored_run_shows_its_tapes(store: Path, fp8bench: Say) -> None:
    code, out, _ = fp8bench("show", kept(store, PRODUCT), "--tape")
    assert code == 0 and "524 kFLOP, 48.0 KiB in 1" in out
    code, out, _ = fp8bench("show", kept(store, PRODUCT), "--tape", "--json")
    assert json.loads(out)["tapes"][0]["tape"]["operators"][0]["operator"] == "mm"
