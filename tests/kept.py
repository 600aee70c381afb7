"""Runs made by hand and kept in a store, as if somebody had measured the grid of gemm at a commit."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fp8bench.model import Environment, Record, Request, Run, Scalar, Status, Work
from fp8bench.store.runs.run_file import load_run, start_run
from tests.runs import NATIVE, case, error, run_of, samples

COMMIT = "0a1b2c3d" * 5
PYTHON = "/opt/env/bin/python"
TITLE = "gemm.Gemm.track_"
ROUNDS = 12
SQUARE: dict[str, Scalar] = {"m": 512, "n": 512, "k": 512, "product": "forward", "operands": "cast"}
_ids = itertools.count()


def facts(commit: object = COMMIT, machine: object = "box", **others: Any) -> dict[str, Any]:
    """Environment facts of a clean commit on a machine that asv could use."""
    return {
        "commit": commit,
        "dirty": False,
        "commit_date": 1767268800000,
        "machine": machine,
        "asv_machine": machine,
        "asv_os": "Linux 6",
        "asv_arch": "x86_64",
        "asv_cpu": "a processor",
        "asv_num_cpu": "2",
        "asv_ram": "1",
        "asv_python": PYTHON,
        **others,
    }


def grid_run(
    environment: dict[str, Any] | None = None,
    rounds: int = ROUNDS,
    version: str = "1",
    seconds: int = 0,
    **changes: Any,
) -> Run:
    """fp32 and bf16 of one square, `rounds` rounds each; starts `seconds` after the beginning of 2026."""
    timings = (
        samples(("gemm", "unattributed"), (900, 20), rounds),
        samples(("gemm", "unattributed"), (500, 9), rounds),
    )
    records = [
        Record(
            one,
            NATIVE,
            Status.OK,
            Work(flops=2.7e8),
            is_reference=one.precision == "fp32",
            timing=timing,
            measurements=(error("product_error", 1e-3), error("peak_memory", 4096.0)),
        )
        for one, timing in zip(_cases(version), timings, strict=True)
    ]
    # Each starts after the previous one, so that "last" is the last one.
    number = 0 if "id" in changes else next(_ids)
    wanted = {
        "id": f"{os.getpid() % 0xFFFF:04x}{number:04x}",
        "started": f"2026-01-01T00:{seconds // 60:02}:{seconds % 60:02}.{number % 1000:03}+00:00",
        "request": Request("gemm"),
        "environment": Environment(facts() if environment is None else environment),
    }
    return run_of(records, **(wanted | changes))


def _cases(version: str) -> Iterator[Any]:
    for precision in ("fp32", "bf16"):
        one = case("gemm", precision, SQUARE)
        yield type(one)(one.workload, one.params, one.precision, one.device, version=version)


def keep(run: Run, store: Path) -> Run:
    """The run after writing and reading it."""
    writer = start_run(run, store)
    writer.append(run.records)
    writer.finish("finished")
    return load_run(writer.path)


def results_files(store: Path) -> list[Path]:
    """asv's results files in the view, for all commits and machines."""
    return sorted(path for path in (store / "asv" / "results").glob("*/*.json") if path.name != "machine.json")
