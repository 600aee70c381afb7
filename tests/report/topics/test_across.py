"""Runs side by side: only like with like, speed-ups without a verdict, and no speed for emulations."""

from __future__ import annotations

from dataclasses import replace

from fp8bench.model import DeviceFacts, Label, Level, Support, Verdict
from tests.materials import Made, nothing, part, recased
from tests.runs import gemm, judged, run_of, transformer
from tests.told_before import Told, as_before

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
