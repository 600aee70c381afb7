"""suite --shares and show --shares, from words to a step's parts as tables, rows, documents and frames."""

from __future__ import annotations

import csv
import io
import shlex
from pathlib import Path

import pytest

from tests.commands import Say, unfolded

RUN = shlex.split(
    "suite mlp --no-isolation --no-report --no-energy --quick --rounds 2 --dtypes fp32,fp8 --set tokens=32 "
    "--set width=64 --set pass=training --set gated=no"
)


@pytest.mark.usefixtures("short_slots")
def test_a_run_knows_its_steps_parts(store: Path, fp8bench: Say) -> None:
    assert fp8bench(*RUN, "--shares")[0] == 0
    code, out, _ = fp8bench("show", "last", "--shares")
    lines = out.splitlines()
    assert code == 0 and any(line.split()[:1] == ["gemm"] for line in lines) and "unattributed" in out
    assert "fp8: emulated: these are parts of what the emulation costs" in unfolded(out)

    _, out, _ = fp8bench("show", "last", "--shares", "--csv", "-")
    rows = list(csv.DictReader(io.StringIO(out)))
    for case in {row["case"] for row in rows}:
        own = [row for row in rows if row["case"] == case]
        kinds = {"gemm", "elementwise"} | ({"cast"} if own[0]["precision"] == "fp8" else set())
        assert sum(float(part["share"]) for part in own) == pytest.approx(1) and own[-1]["kind"] == "unattributed"
        assert kinds <= {part["kind"] for part in own} and {part["provenance"] for part in own} == {"estimated"}


def test_who_asked_for_none_is_told_how(store: Path, fp8bench: Say) -> None:
    from tests.kept import grid_run, keep

    run = keep(grid_run(), store)
    code, _, error = fp8bench("show", run.id, "--shares")
    assert code == 2 and "Measure it again with --shares." in unfolded(error)
    code, _, error = fp8bench("show", run.id, "--shares", "--tape")
    assert code == 2 and "Give one of them" in unfolded(error)
