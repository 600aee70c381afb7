"""Casts, gradient buffers and moments on a GPU. Skipped with the reason without one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from fp8bench.devices.cuda import Cuda
from fp8bench.model import Case, DeviceFacts, MemoryUse, Request
from fp8bench.model.raw import Settings, StateCheck
from fp8bench.plan.make import make_plan
from fp8bench.protocols import SilentPhases
from fp8bench.registry import workloads
from fp8bench.worker.bench import Bench
from tests.gpu.waits import none_may_wait
from tests.plans import cases_of

pytestmark = pytest.mark.gpu

# Sizes that take no time, and the largest error of each precision there.
SMALL = {
    "cast": (("shape", ("256",)), ("role", ("input", "gradient"))),
    "accumulate": (("micro_batches", ("4",)), ("width", ("128",))),
    "optimizer": (("width", ("128",)),),
}
LARGEST_ERROR = {"fp32": 1e-5, "bf16": 0.01, "fp16": 0.01, "fp8": 0.15, "mxfp8": 0.15, "nvfp4": 0.6}


@pytest.fixture
def facts() -> DeviceFacts:
    return Cuda().available()[0]


@pytest.fixture
def bench() -> Iterator[Bench]:
    before = torch.get_num_threads()
    yield Bench(Settings())
    torch.set_num_threads(before)


def cases(name: str, precision: str, facts: DeviceFacts) -> list[Case]:
    plan = make_plan(Request(name, (precision,), (facts.key,), axes=SMALL[name]), (facts,))
    result = [planned.case for planned in cases_of(plan) if planned.runs]
    if not result:
        pytest.skip(f"{facts.name} does not do {precision}")
    return [case for case in result if dict(case.params).get("scaling") != "off"]


@pytest.mark.parametrize("precision", LARGEST_ERROR)
@pytest.mark.parametrize("name", SMALL)
def test_steps_do_not_wait_for_the_device(name: str, precision: str, facts: DeviceFacts, bench: Bench) -> None:
    for case in cases(name, precision, facts):
        bench.prepare("one", case, facts)
        with none_may_wait():
            workloads.get(name).step(bench._prepared["one"].state, SilentPhases())
        assert bench.check("one") == StateCheck()
        bench.release("one")


@pytest.mark.parametrize("precision", LARGEST_ERROR)
@pytest.mark.parametrize("name", SMALL)
def test_no_step_is_taken_for_idle_and_none_leaks(name: str, precision: str, facts: DeviceFacts, bench: Bench) -> None:
    for case in cases(name, precision, facts):
        assert bench.effect(case, facts).changes is not False
        memory = bench.memory(case, facts)
        assert isinstance(memory, MemoryUse) and memory.leak == 0


@pytest.mark.parametrize("precision", LARGEST_ERROR)
@pytest.mark.parametrize("name", SMALL)
def test_errors_on_the_device_are_as_small_as_the_precision_allows(
    name: str, precision: str, facts: DeviceFacts, bench: Bench
) -> None:
    """Native kernels are no worse than the emulation.

    An optimizer's update has more error: it is the difference of two parameters, whose last bits weigh up to a
    thousandth of it.
    """
    processor = next(item for item in bench.probe() if item.kind == "cpu")
    for case in cases(name, precision, facts):
        there = bench.error(replace(case, device=processor.key), processor) if name == "optimizer" else {}
        for metric, value in bench.error(case, facts).items():
            allowed = max(LARGEST_ERROR[precision], 1.1 * there.get(metric, 0.0) + 1e-3 * bool(there))
            assert 0 <= value < allowed, (case.id, metric)
