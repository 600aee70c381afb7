"""Static scales in the worker: found once from data, on a separate state, for all requests of a case."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from fp8bench.model import Case, LayerScale, Request, StaticScales, Status
from fp8bench.nn.arithmetics import RecipeArithmetic
from fp8bench.plan.make import make_plan
from fp8bench.protocols import Arithmetic, Operand, Role, SilentPhases
from fp8bench.registry import workloads
from fp8bench.worker.bench import Bench
from tests.facts import CPU
from tests.fakes import Script, broken, planned
from tests.measure.test_group import measure

SMALL = (("size", ("nano",)), ("batch", ("1",)), ("sequence", ("16",)))
SCALES = (LayerScale("one", "input", 2.0, 224.0, 3),)


def case_of(dtype: str = "fp8", suite: str = "transformer", **request: Any) -> Case:
    axes = SMALL if suite == "transformer" else (("tokens", ("32",)), ("width", ("32",)), ("hidden", ("32",)))
    asked = Request(suite, ("fp32", dtype), ("cpu",), axes=axes, **{"static_scales": 2, **request})
    found = make_plan(asked, (CPU,)).groups[0].cases[1].case
    assert found.static is not None and (found.precision == dtype or found.precision_map)
    return found


class Recording(RecipeArithmetic):
    """Current scaling that records what it casts."""

    seen: dict[tuple[str, str], float]

    def layer(self, name: str) -> Arithmetic:
        found = Recording(self.recipe, self.carrier, name)
        found.seen = self.seen
        return found

    def operand(self, tensor: Tensor, role: Role, again: bool) -> Operand:
        key = self.name, role.value
        self.seen[key] = max(self.seen.get(key, 0.0), float(tensor.detach().abs().max()))
        return super().operand(tensor, role, again)


def recorded(bench: Bench, case: Case, steps: int) -> dict[tuple[str, str], float]:
    """The largest magnitudes of some steps with current scales, by layer and role."""
    setup = bench._make_case_setup(replace(case, static=None), CPU)
    assert isinstance(setup.arithmetic, RecipeArithmetic)
    recording = Recording(setup.arithmetic.recipe)
    recording.seen = {}
    state = workloads.get(case.workload).prepare(replace(setup, arithmetic=recording))
    for _ in range(steps):
        workloads.get(case.workload).step(state, SilentPhases())
    return recording.seen


def kept(bench: Bench, case: Case, slots: int = 1) -> tuple[LayerScale, ...]:
    """The scales of a state after preparing it, which takes a step, and some more steps."""
    bench.prepare("one", case, CPU)
    try:
        for _ in range(slots):
            bench.slot("one", 1, 0)
        return bench.scales("one")
    finally:
        bench.release("one")


def test_scales_come_from_the_largest_magnitudes_of_so_many_steps(bench: Bench) -> None:
    case = case_of()
    wanted = recorded(bench, case, 2)
    assert len(wanted) == 8 * 3 and wanted != recorded(bench, case, 1)
    found = kept(bench, case, slots=3)
    assert {(scale.layer, scale.role): scale.amax for scale in found} == wanted
    for scale in found:
        largest = 57344.0 if scale.role == "gradient" else 448.0
        assert scale.scale == pytest.approx(largest / scale.amax, rel=1e-6) and scale.renewals == 0


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Records, for each prepared transformer state, whether its scales are being found."""
    seen: list[bool] = []
    transformer = type(workloads.get("transformer"))
    prepare = transformer.prepare

    def noting(self: Any, setup: Any) -> Any:
        seen.append(setup.scales.watching)
        return prepare(self, setup)

    monkeypatch.setattr(transformer, "prepare", noting)
    return seen


@pytest.mark.slow
def test_a_case_is_calibrated_once_and_its_states_start_alike(bench: Bench, watched: list[bool]) -> None:
    case = case_of("fp8-e4m3")
    bench.calibrate(case, CPU)
    assert watched == [True]
    assert kept(bench, case) == kept(bench, case)
    bench.error(case, CPU)
    bench.memory(case, CPU)
    assert watched == [True, False, False, False]


def test_errors_are_those_of_the_scales_from_data(bench: Bench) -> None:
    case = case_of()
    static, current = (bench.error(variant, CPU)["gradient_error"] for variant in (case, replace(case, static=None)))
    assert static != current and static == pytest.approx(current, rel=0.5)
    assert static == bench.error(case, CPU)["gradient_error"]


def test_scales_are_renewed_in_every_so_manieth_step(bench: Bench) -> None:
    """The preparing step counts: of 7 steps the 3rd and the 6th are watched."""
    found = kept(bench, case_of(refresh_scales=3), slots=6)
    assert {scale.renewals for scale in found} == {2}
    plain = {(scale.layer, scale.role): scale.amax for scale in kept(bench, case_of())}
    assert any(plain[scale.layer, scale.role] != scale.amax for scale in found)


def test_a_bound_renews_what_saturates_alone(bench: Bench) -> None:
    """Without tolerance: some tensors exceed their scale, others never do."""
    found = kept(bench, case_of(saturation_bound=0.0), slots=4)
    assert any(scale.renewals for scale in found) and not all(scale.renewals for scale in found)
    loose = kept(bench, case_of(saturation_bound=99.0), slots=4)
    assert not any(scale.renewals for scale in loose)


def test_a_group_calibrates_before_it_prepares_and_keeps_what_scales_came_to() -> None:
    static = replace(planned("fp8"), case=replace(planned("fp8").case, static=StaticScales(2)))
    mode = static.case.mode
    records, worker = measure({mode: Script(scales=SCALES)}, planned("bf16"), static)
    assert records[mode].scales == SCALES and records["bf16"].scales == ()
    assert [entry for entry in worker.log if entry[0] == "calibrate"] == [("calibrate", mode)]
    assert worker.log.index(("calibrate", mode)) < worker.log.index(("prepare", mode))
    records, _ = measure({mode: broken("calibrate")}, planned("bf16"), static)
    failed = records[mode]
    assert failed.status is Status.FAILED and "no such thing" in failed.reason and failed.scales == ()
    assert records["bf16"].status is Status.OK


def test_known_scales_are_loaded_as_they_were_and_nothing_is_calibrated(bench: Bench, watched: list[bool]) -> None:
    found = kept(bench, case_of())
    watched.clear()
    known = tuple(("fp8", scale.layer, scale.role, scale.amax) for scale in found)
    case = case_of(static_scales=None, scales_from="a1b2", known_scales=known)
    assert case.id == case_of().id.replace("static=2", "static=a1b2")
    bench.calibrate(case, CPU)
    assert kept(bench, case, slots=2) == found and watched == [False]
    others = tuple(
        (mode, layer, role, amax * size)
        for mode, size in (("fp8-e4m3", 2.0), ("fp8-delayed", 4.0))
        for _, layer, role, amax in known
    )
    doubled = kept(bench, case_of(static_scales=None, scales_from="a1b2", known_scales=(*known, *others)))
    assert doubled == found
    largest = kept(bench, case_of(static_scales=None, scales_from="a1b2", known_scales=others))
    assert [scale.amax for scale in largest] == [4.0 * scale.amax for scale in found]
