"""Runs of a GPU made by hand, of which it is known what the right advice is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fp8bench.analysis.findings import findings
from fp8bench.features.advise.basis import AdviceBasis
from fp8bench.features.advise.decide import advise as advise_on
from fp8bench.features.advise.values import Advice, AdviceKind, AdviceResult, RuleAnswer
from fp8bench.model import Case, Level, MemoryUse, Record, Run, Scalar, Status, Support, Work
from fp8bench.model.step import Coverage
from tests.facts import H200
from tests.runs import run_of, samples

Phases = Mapping[str, int]  # microseconds
# A training step with 60% products; the second step has products twice as fast, plus casts.
BF16 = {"gemm": 6000, "optimizer_step": 2500, "elementwise": 1500}
FP8 = {"cast": 600, "gemm": 3000, "optimizer_step": 2500, "elementwise": 1500}
NANO: Mapping[str, Scalar] = {"size": "gpt2-124m", "batch": 8, "sequence": 1024}


def case_of(mode: str, params: Mapping[str, Scalar] = NANO, workload: str = "transformer") -> Case:
    return Case(workload, tuple(params.items()), mode, H200.key)


def record(
    mode: str,
    phases: Phases,
    params: Mapping[str, Scalar] = NANO,
    level: Level = Level.NATIVE,
    reference: bool = False,
    memory: MemoryUse | None = None,
    workload: str = "transformer",
    coverage: Coverage | None = None,
) -> Record:
    """24 rounds of this case, with a control if it is the reference."""
    timing = samples(tuple(phases), tuple(phases.values()), rounds=24)
    return Record(
        case_of(mode, params, workload),
        Support(level, f"{mode} is {level}"),
        Status.OK,
        Work(flops=1e9),
        reference,
        timing=timing,
        control=timing if reference else None,
        memory=memory,
        coverage=coverage,
    )


def group(
    params: Mapping[str, Scalar] = NANO,
    level: Level = Level.NATIVE,
    workload: str = "transformer",
    bf16: Phases = BF16,
    **modes: Phases,
) -> list[Record]:
    """A group with bf16 as the reference and one arm per keyword ('fp8_rowwise' is 'fp8-rowwise')."""
    lead = record("bf16", bf16, params, reference=True, workload=workload)
    return [
        lead,
        *(record(mode.replace("_", "-"), one, params, level, workload=workload) for mode, one in modes.items()),
    ]


def run(*groups: list[Record]) -> Run:
    records = []
    for group in groups:
        records += group
    return replace(run_of(records), devices=(H200,))


def basis(*groups: list[Record], **more: object) -> AdviceBasis:
    made = run(*groups)
    return AdviceBasis(made, findings(made), **more)  # type: ignore[arg-type]


def advise(*groups: list[Record], **more: object) -> AdviceResult:
    return advise_on(basis(*groups, **more))


def answer(found: AdviceResult, rule: str, mode: str = "fp8") -> RuleAnswer:
    return next(one for one in found.answers if (one.rule, one.mode) == (rule, mode))


def only(found: AdviceResult, kind: AdviceKind, mode: str = "fp8") -> Advice:
    (one,) = (one for one in found.advice if one.mode == mode and one.kind is kind)
    return one
