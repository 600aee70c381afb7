"""The cases at hand in other runs: commit by commit, and side by side, with no verdict and no speed of emulations."""

from __future__ import annotations

from dataclasses import replace

from fp8bench.model import DeviceFacts, Environment, Figure, Label, Level, Series, Support, Trend, Verdict
from fp8bench.report.page.section import PastSeries
from tests.materials import Made, nothing, part, recased
from tests.runs import gemm, judged, run_of, transformer
from tests.told_before import Told, as_before

DAY = 86_400_000
UNITS = {"time": "seconds", "launches": "count"}


def at_commit() -> Made:
    run, findings = transformer()
    return replace(run, environment=Environment({"commit": "3" * 40})), findings


def figure(number: int, value: float, **changes: object) -> Figure:
    made = Figure(str(number) * 40, number * DAY, "1", 1, 24, value, 0.9 * value, 1.1 * value)
    return replace(made, **changes)  # type: ignore[arg-type]


def series(precision: str, *figures: Figure, metric: str = "time", shape: str = "512", **changes: object) -> PastSeries:
    own = Series(f"gemm.Gemm.track_{metric}", "gemm", metric, UNITS[metric], ("dtype", "shape"), (), "1")
    made = PastSeries(Trend(own, (precision, shape), {"machine": "box"}, "", figures))
    return replace(made, **changes)  # type: ignore[arg-type]


@as_before
def test_history() -> Told:
    counts = series("bf16", figure(1, 20_110.0), figure(2, 20_111.0), metric="launches")
    yield "a count is told with all its digits", part("history", at_commit(), past=(counts,))
    emulation = series("fp8", figure(1, 0.01), figure(2, 0.09), emulated=True)
    yield "emulations are in no chart", part("history", at_commit(), past=(emulation,))
    shapes = ("256", "512")
    two = [series("bf16", figure(1, 1.0), figure(2, 1.0), shape=shape) for shape in shapes]
    yield "places are named where there are several", part("history", at_commit(), past=tuple(two))
    modes = ("fp32", "bf16", "fp16", "tf32")
    many = [series(mode, figure(1, 1.0), figure(2, 1.0), shape=shape) for shape in shapes for mode in modes]
    yield "and have charts of their own where too many", part("history", at_commit(), past=tuple(many))
    rough = series("bf16", figure(1, 1.0, hasty=True), unkept=(figure(2, 2.0),), incomparable=3)
    yield (
        "rough figures are grey and said; what does not compare is counted",
        part("history", at_commit(), past=(rough,)),
    )
    for past in ((), (series("bf16", figure(3, 1.0)),)):
        yield f"{len(past)} series with this run alone are no history", part("history", at_commit(), past=past)
    odd = series("bf16", figure(1, float("nan")), figure(2, float("inf")), figure(3, 0.0), figure(4, 2.0))
    yield "figures that are no numbers are left out", part("history", at_commit(), past=(odd,))


FASTER = (Verdict.FASTER, 0.5)


def elsewhere(made: Made, name: str = "NVIDIA H200", slower: float = 1.0) -> Made:
    """The same run on another device, with every time multiplied."""
    run, findings = recased(made, lambda case: replace(case, device="cuda:0"))
    moved = {
        key: replace(finding, best_seconds=finding.best_seconds and finding.best_seconds * slower)
        for key, finding in findings.items()
    }
    gpu = DeviceFacts("cuda", 0, name, 139 << 30, "2.13.0")
    return run_of([*run.records], id="other", devices=(gpu,)), moved


@as_before
def test_across() -> Told:
    faster, two = judged(FASTER), judged(FASTER, FASTER)
    noisy = elsewhere(judged(FASTER, (*FASTER, Label.NOISY)), slower=0.5)
    yield "no chart claims a verdict, and doubt is grey", part("across", two, noisy)
    run, findings = gemm()
    native = Support(Level.NATIVE, "")
    records = (replace(record, support=native) if record.case.precision == "fp8" else record for record in run.records)
    hardware = elsewhere((replace(run, records=tuple(records)), findings))
    yield "an emulation has a cost and no ratio", part("across", (run, findings), hardware)
    run, findings = recased(faster, lambda case: replace(case, version="2"))
    yield "another version is another case", part("across", faster, (replace(run, id="2"), findings))
    yield "what one run alone timed is counted", part("across", two, elsewhere(faster))
    run, findings = recased(faster, lambda case: replace(case, params=case.params[::-1]))
    yield "the order of parameters does not matter", part("across", faster, (replace(run, id="2"), findings))
    three = faster, elsewhere(faster, "B200", 0.5), elsewhere(faster, "A100", 2.0)
    yield "three runs are held against the first", part("across", *three)
    more = elsewhere(two, "B200"), elsewhere(two, "A100")
    yield "a case that the first run lacks has no ratio", part("across", faster, *more)
    run, findings = faster
    gpu, moved = elsewhere(faster)
    both = run_of([*run.records, *gpu.records], id="both", devices=(*run.devices, *gpu.devices))
    yield "devices of one run are columns too", part("across", (both, findings | moved), transformer())
    yield "runs without a timed case have nothing in common", part("across", nothing(), nothing())
