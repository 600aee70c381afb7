"""Whole ceilings, measured, kept, and used by the next run; and quoted figures against datasheets."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fp8bench.analysis.compare.compare import compare
from fp8bench.analysis.compare.sides import make_comparison_side
from fp8bench.analysis.findings import findings
from fp8bench.analysis.metrics import iterate_case_metrics
from fp8bench.cli.main import main
from fp8bench.cli.progress import TERMINAL_JOB_OBSERVER
from fp8bench.errors import StoreError, UsageError, WorkerLost
from fp8bench.jobs import ceilings as job
from fp8bench.jobs.ceilings import describe_quoted_figures, is_quote_wrong, parse_quoted_figure
from fp8bench.jobs.several_runs import measure_standard_case
from fp8bench.measure.handle import LocalWorker
from fp8bench.model import Ceilings, DeviceFacts, Direction, Limit, Rate, Request, specs
from fp8bench.store.runs.run_file import load_run
from fp8bench.worker.bench import Bench
from tests.counts import for_each
from tests.runs import render_whole

FOUND = Ceilings(
    (
        Rate(Limit.PRODUCT, "bf16", (4.24e11, 4.25e11, 4.26e11), 6, (512, 512, 2048)),
        Rate(Limit.PRODUCT, "nvfp4", searched=1, why="RuntimeError: no kernel"),
        Rate(Limit.COPY, runs=(8e9, 1e10, 9e9), searched=2, shape=(1 << 26,)),
        Rate(Limit.LAUNCH, runs=(5e5, 5e5, 5e5), shape=(1,)),
    ),
    "2026-11-22T23:24:30+00:00",
    (("torch", "2.13.0"), ("cuda:0 power_cap", 700.0), ("device", "cuda:0"), ("name", "H200")),
)


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the worker by one in this process."""
    monkeypatch.setattr(job, "ProcessWorker", LocalWorker)


RUNS = {
    Limit.PRODUCT: (4.24e11, 4.25e11, 4.26e11, 4.25e11, 4.24e11),
    Limit.COPY: (8e9, 1e10, 9e9, 8.5e9, 9.5e9),
    Limit.LAUNCH: (5e5,) * 5,
}


def measured_by_hand(monkeypatch: pytest.MonkeyPatch, fails: Limit | None = None, times: float = 1.0) -> list[Rate]:
    """Makes five runs reach FOUND's rates, `times` as fast; returns the requested pieces."""
    pieces: list[Rate] = []

    def one_more(self: Bench, facts: DeviceFacts, rate: Rate, seconds: float) -> Rate:
        pieces.append(rate)
        if rate.limit is fails and rate.runs:
            raise WorkerLost("it crashed")
        whole = next(known for known in FOUND.rates if (known.limit, known.precision) == (rate.limit, rate.precision))
        value = () if not rate.shape else (times * RUNS[rate.limit][len(rate.runs)],)
        return replace(whole, runs=(*rate.runs, *value))

    bare = tuple(Rate(rate.limit, rate.precision) for rate in FOUND.rates)
    monkeypatch.setattr(Bench, "ceiling_rates", lambda self, facts: bare)
    monkeypatch.setattr(Bench, "ceiling", one_more)
    return pieces


def test_a_store_that_cannot_be_written_is_said_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = tmp_path / "file" / "store"
    for measure in (
        lambda: job.run_ceilings(Request("ceilings"), store, ""),
        lambda: next(measure_standard_case(store, TERMINAL_JOB_OBSERVER)),
    ):
        with pytest.raises(StoreError, match=r"cannot be written .* Choose another --store"):
            measure()


def test_the_suite_is_a_run_like_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured_by_hand(monkeypatch)
    run = job.run_ceilings(Request("ceilings", devices=("cpu",)), tmp_path, "a test")
    assert run.finished and run.ok and run == load_run(Path(run.path))
    cases = [(record.case.param("limit"), record.case.precision, record.status.value) for record in run.records]
    assert cases == [
        ("product", "bf16", "ok"),
        ("product", "nvfp4", "skipped"),
        ("copy", "fp32", "ok"),
        ("launch", "fp32", "ok"),
    ]
    bf16, nvfp4, copied, _ = run.records
    assert bf16.measurements[0].samples == RUNS[Limit.PRODUCT] and nvfp4.reason == "RuntimeError: no kernel"
    assert copied.detail == "arrays of 64.0 MiB, the best of 2 searched; spread 22.2% over 5 runs: no bound"
    (metric,) = [metric for metric in iterate_case_metrics(bf16, None) if metric.name == specs.CEILING_RATE]
    assert (metric.unit, metric.value, metric.better) == ("FLOP/s", 4.25e11, "higher")
    assert "throughput" in render_whole(run, findings(run)) and "425 GFLOP/s" in render_whole(run, findings(run))


def test_a_comparison_shows_that_the_machine_became_slower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    for times in (1.0, 0.5):
        measured_by_hand(monkeypatch, times=times)
        runs.append(job.run_ceilings(Request("ceilings", devices=("cpu",)), tmp_path / str(times), "a test"))
    sides = [make_comparison_side(run.id, [(run, findings(run))]) for run in runs]
    comparisons = {comparison.case: comparison for comparison in compare(*sides).comparisons}
    bf16 = comparisons["ceilings[limit=product]@cpu/bf16"]
    assert (bf16.metric, bf16.direction, bf16.before) == ("ceiling_time", Direction.WORSE, pytest.approx(1 / 425))
    assert bf16.ratio is not None and bf16.ratio.point == pytest.approx(2)
    assert comparisons["ceilings[limit=launch]@cpu/fp32"].ratio is not None


@for_each("change", [{"quick": True}, {"dtypes": ("bf16",)}, {"axes": (("m", ("1",)),)}, {"rounds": 3}])
def test_the_suite_refuses_what_it_would_ignore(change: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="takes only --devices, --threads"):
        job.run_ceilings(Request("ceilings", **change), tmp_path, "a test")


def test_what_ends_the_worker_ends_one_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured_by_hand(monkeypatch, fails=Limit.COPY)
    records = job.run_ceilings(Request("ceilings", devices=("cpu",)), tmp_path / "store", "a test").records
    assert [record.status.value for record in records] == ["ok", "skipped", "skipped", "ok"]
    assert records[2].reason == "WorkerLost: it crashed"


@pytest.mark.slow
def test_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp8bench.measure.ceilings.CEILING_SECONDS", 1.0)
    records = job.run_ceilings(Request("ceilings", devices=("cpu",)), tmp_path / "store", "a test").records
    for limit in set(Limit) - {Limit.LOAD}:
        details = [record.detail for record in records if record.case.param("limit") == limit.value]
        assert re.search("over [2-5] runs", details[0]), details  # large arrays take long to create and are fewer


@for_each(
    ("text", "right", "words"),
    [
        ("H200 tf32 312", False, ("WRONG: 312 TFLOP/s is not tf32 of", "494.5 TFLOP/s, dense", "sparse tf32 of A100")),
        ("H200 fp8 3958", False, ("operands with 2:4 sparsity", "1979 TFLOP/s, dense")),
        ("H200 tf32 989.5", False, ("that is the peak of bf16 and fp16 on H200 SXM",)),
        ("H100 SXM bandwidth 4800", False, ("that is bandwidth of H200 SXM", "3350 GB/s")),
        ("NVIDIA H200 bf16 989", True, ("right of H200 SXM", "https://www.nvidia.com/en-us/data-center/h200/")),
        ("H200 NVL bf16 835.5", True, ("datasheet, unverified",)),
        ("H200 SXM e4m3 1979", True, ()),
        ("H200 SXM memory 141", True, ("141 GB",)),
        ("H200 SXM link 900", False, ("450 GB/s",)),
        ("A100 SXM 80 GB watts 400", True, ("400 W",)),
        ("TPU v5p bf16 459", True, ("published figures only", "https://docs.cloud.google.com/tpu/docs/v5p-training")),
        ("Gaudi3 bf16", True, ("1835 TFLOP/s", "unverified", "fp8bench does not run on such a device")),
    ],
)
def test_a_quote(text: str, right: bool, words: tuple[str, ...]) -> None:
    quote = parse_quoted_figure(text)
    said = "\n".join(describe_quoted_figures([quote]))
    assert is_quote_wrong(quote) is not right and all(word in said for word in words), said
    assert right or "right" not in said


@for_each(
    ("text", "why"),
    [
        ("", "cannot be read"),
        ("H200", "cannot be read"),
        ("H200 312", "cannot be read"),
        ("H200 tf32 -3", "cannot be read"),
        ("H200 tf32 nan", "cannot be read"),
        ("H200 tf32 inf", "cannot be read"),
        ("H200 speed 3", "'speed' is not a figure"),
        ("H900 tf32 3", "no datasheet of 'H900'"),
        ("NVIDIA tf32 3", "no datasheet"),
        ("H200 fp4 3", "publishes no fp4"),
        ("L4 memory 24", "publishes no memory"),
        (
            "TPU v5p fp8 459",
            "lists 459 TFLOP/s of FP8, .* no units for FP8 .https://docs.cloud.google.com/tpu/docs/v5p",
        ),
        ("TPU v5p e4m3", "TPU v5p has no peak of e4m3"),
    ],
)
def test_what_is_no_quote(text: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        parse_quoted_figure(text)


def test_the_exit_code_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    """1 if any of several is wrong; a question is never wrong."""
    assert main(["doctor", "--peak", "H200 bf16 989", "--peak", "H200 tf32 312"]) == 1
    assert "right of H200 SXM" in (said := capsys.readouterr().out) and "WRONG" in said
    assert main(["doctor", "--peak", "H200 bf16"]) == 0
    assert main(["doctor", "--peak", "H200 bf16", "--calibrate"]) == 2
    assert main(["doctor", "--peak", "H200 bf16", "--topology", "links.yaml"]) == 2
