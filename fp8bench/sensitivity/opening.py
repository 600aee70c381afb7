"""From what was asked to what will run: names checked before anything is started, cases made by the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fp8bench.answers import sound_layers
from fp8bench.errors import UsageError
from fp8bench.measure.limits import Limits
from fp8bench.model import DeviceFacts, Request
from fp8bench.plan import check_names, make_plan
from fp8bench.registry import precisions, workloads
from fp8bench.sensitivity.runs import Bed
from fp8bench.sensitivity.study import By, Study, Trial

SUITE = "transformer"


@dataclass(frozen=True)
class Question:
    """What a person asks, as given. `tolerance` is a share."""

    dtype: str
    reference: str
    by: By
    size: str
    steps: int
    tolerance: float
    seed: int = 0
    threads: int = 1
    device: str | None = None
    data: str | None = None
    imports: tuple[str, ...] = ()
    isolation: bool = True
    case_timeout: float | None = None

    @property
    def request(self) -> Request:
        """The suite's run that has its two cases."""
        return Request(
            SUITE, (self.dtype,), (self.device,) if self.device else (), self.reference, (("size", (self.size,)),),
            data=self.data, seed=self.seed, threads=self.threads, imports=self.imports, isolation=self.isolation,
            case_timeout=self.case_timeout,
        )  # fmt: skip


def check(question: Question) -> None:
    """Raise for what cannot be meant, before anything is started."""
    check_names(question.request)
    low, reference = (precisions.get(word) for word in (question.dtype, question.reference))
    if low.mode == reference.mode:
        raise UsageError(
            f"--dtype and --reference are both {low.mode}, so that no layer would differ. Give --reference a higher "
            "precision."
        )
    if reference.rank > low.rank:
        raise UsageError(
            f"--reference {reference.mode} is a lower precision than --dtype {low.mode}: exchange them, or leave "
            "--reference out."
        )
    if low.float32_products != reference.float32_products:
        raise UsageError(
            f"{low.mode} and {reference.mode} cannot be mixed layer by layer: TF32 is one switch for a whole process. "
            "Give another --reference or --dtype."
        )


def opened(question: Question, facts: Sequence[DeviceFacts], corpus: str | None) -> tuple[Study, Bed]:
    """The study before its first run, and what all its runs share. Raises for a precision that the device refuses."""
    (group,) = make_plan(question.request, facts, corpus).groups
    by_mode = {planned.case.precision: planned for planned in group.cases}
    low, reference = (by_mode[precisions.canonical(word)] for word in (question.dtype, question.reference))
    for planned in (low, reference):
        if planned.skip:
            raise UsageError(f"{planned.case.precision} cannot be run on {planned.case.device}: {planned.skip}.")
    workload, precision = workloads.get(SUITE), precisions.get(low.case.precision)
    device = next(one for one in facts if one.key == low.case.device)
    layers = sound_layers(workload, workload.layers(dict(low.case.params)))
    high = precision.carried_by or precision.mode
    bed = Bed(
        low.case, reference.case, layers, high, device, low.work, question.steps, Limits(question.case_timeout)
    )  # fmt: skip
    study = Study(
        SUITE, low.case.params, device.key, low.case.precision, reference.case.precision, low.support.level.value,
        question.by, question.steps, question.tolerance, question.seed,
        Trial("reference", "", reference.case.precision),
    )  # fmt: skip
    return study, bed
