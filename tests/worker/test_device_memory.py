"""Memory that hardware would need for an emulated step: by hand, and compared with a step on real codes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch

from fp8bench.model import Case, MemoryUse, Request
from fp8bench.model.consumed import EmulationEnd, EmulationStart, Laid, Lifted
from fp8bench.nn import rotations
from fp8bench.nn.linear import Linear
from fp8bench.plan.make import make_plan
from fp8bench.profiler.allocations import Event, LiveAllocationAddresses, MemoryChange, PhaseStart, find_memory_course
from fp8bench.protocols import Arithmetic, MemoryMeter, Operand, Phases, Role, Setup
from fp8bench.registry import devices, precisions, workloads
from fp8bench.worker.bench import Bench
from fp8bench.worker.device_layout import DeviceLedger
from fp8bench.worker.memory_pass import _measure_second_step, make_memory_pass_preparer
from tests.counts import for_each, sampled
from tests.worker.device_codes import RealCodes
from tests.worker.scripted import CPU, Script
from tests.worker.scripted import script as script
from tests.worker.test_memory_by_hand import SMALL

TOKENS, WIDTH, HIDDEN = 32, 64, 128


class Perceptron:
    """Two linear layers with ReLU between them, whose weights have gradients and momenta; no phases."""

    def __init__(self, setup: Setup) -> None:
        torch.manual_seed(0)
        self.up, self.down = (
            Linear(inputs, outputs, setup.arithmetic.layer(name))
            for name, inputs, outputs in (("up", WIDTH, HIDDEN), ("down", HIDDEN, WIDTH))
        )
        self.x = torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16)
        weights = [self.up.weight, self.down.weight]
        self.optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9, foreach=False)

    def step(self, phase: Phases) -> None:
        hidden = self.up(self.x, phase).relu()
        y = self.down(hidden, phase)
        del hidden
        y.backward(torch.ones_like(y))
        self.optimizer.step()
        self.optimizer.zero_grad()


def tiles(rows: int, columns: int) -> int:
    """The bytes of E8M0 scales, one per 32 elements, in tiles of 128 rows and 4 scales."""
    return -(-rows // 128) * 128 * -(-columns // 128) * 4


# Bytes of an element's codes, and of a matrix's scales; with one scale per tensor both orientations share it.
LAYOUTS: Mapping[str, tuple[float, Callable[[int, int], int]]] = {
    "fp8-rowwise": (1, lambda rows, columns: 4 * rows),
    "fp8-block": (1, lambda rows, columns: 4 * rows * -(-columns // 128)),
    "mxfp8": (1, tiles),
    "mxfp4": (0.5, tiles),
}


def by_hand(code: float, scales: int) -> float:
    """The peak is in the upper product's backward, when its weight gradient is converted from bf16 to fp32.

    It consists of both fp32 weights with momenta, and the batch; the output and its gradient; the lower weight's
    gradient in fp32, the upper's in both; the hidden layer's gradient and its codes in both orientations; the batch's
    transposed codes from forward.
    """
    weights = WIDTH * HIDDEN
    hidden = TOKENS * HIDDEN
    batch = TOKENS * WIDTH
    state = 2 * 4 * 2 * weights + 2 * batch
    gradients = 4 * weights + (4 + 2) * weights + 2 * hidden
    return state + 2 * 2 * batch + gradients + code * (2 * hidden + batch) + scales


def derived(bench: Bench, case: Case) -> int:
    use = bench.memory(case, CPU)
    assert isinstance(use, MemoryUse) and not use.off_device and use.on_device is not None
    return use.on_device


@pytest.mark.parametrize("precision", ["fp8", *LAYOUTS])
def test_a_perceptron_by_hand(precision: str, bench: Bench, script: Script) -> None:
    code, scales_of = LAYOUTS.get(precision, (1, lambda rows, columns: 4))
    shapes = [(TOKENS, HIDDEN), (HIDDEN, TOKENS), (WIDTH, TOKENS)][precision == "fp8" :]
    expected = by_hand(code, sum(scales_of(*shape) for shape in shapes))
    assert derived(bench, script(Perceptron, precision=precision)) == expected


def with_codes(bench: Bench, case: Case) -> int:
    """The peak of the same step with real codes in memory."""
    precision = precisions.get(case.precision)
    device = devices.get("cpu")
    meter = device.memory_meter(0)
    hardware = precision.laid_out(CPU)
    assert isinstance(meter, MemoryMeter) and isinstance(hardware, Arithmetic)
    ledger = DeviceLedger(meter)

    def setup() -> Setup:
        return replace(bench._make_case_setup(case, CPU), arithmetic=RealCodes(hardware, ledger))

    found = _measure_second_step(
        make_memory_pass_preparer(workloads.get(case.workload), setup), device, meter, None
    ).memory_course
    assert found is not None and found.on_device is not None
    return found.on_device


SUITES = ("gemm", "mlp", "attention", "transformer", "moe", "accumulate", "optimizer", "cast", "learning")
QUICK = [("gemm", "nvfp4"), ("mlp", "fp8"), ("optimizer", "fp8"), ("accumulate", "mxfp8")]
FORMATS = ("fp8", "fp8-rowwise", "fp8-block", "fp8-delayed", "mxfp8", "mxfp4", "nvfp4")
ALL = sampled([], [(suite, mode) for suite in SUITES for mode in FORMATS if (suite, mode) not in QUICK])


@pytest.mark.parametrize(("suite", "precision"), [*QUICK, *ALL])
def test_against_codes_in_memory(suite: str, precision: str, bench: Bench) -> None:
    axes = tuple((axis, (value,)) for axis, value in SMALL[suite].items())
    plan = make_plan(Request(suite, (precision,), ("cpu",), axes=axes), (CPU,))
    cases = [one for group in plan.groups for one in group.cases if one.case.precision == precision and not one.skip]
    for case in (planned.case for planned in cases):
        with_codes(bench, case)  # one-time allocations of the process exist by then
        figures = []
        for counted in (with_codes, derived):
            rotations._make_hadamard_matrix.cache_clear()  # a matrix that a state creates is part of it
            figures.append(counted(bench, case))
        assert figures[0] == figures[1], case


@for_each(
    ("suite", "precision", "why"),
    [
        ("gemm", "mxfp6", "no library here has a product of e3m2 and e3m2"),
        ("gemm", "custom:format=e3m2", "no library here has a product"),
        ("conv", "fp8", "torch has no convolution in small formats"),
        ("data", "fp8", "batches are copied as values"),
    ],
)
def test_where_it_cannot_be_measured_there_is_a_reason(suite: str, precision: str, why: str, bench: Bench) -> None:
    asked = tuple((axis, (value,)) for axis, value in SMALL[suite].items())
    group = make_plan(Request(suite, (precision,), ("cpu",), axes=asked), (CPU,)).groups[0]
    case = next(planned.case for planned in group.cases if planned.case.precision == precision)
    use = bench.memory(case, CPU)
    assert isinstance(use, MemoryUse) and use.on_device is None and use.off_device.startswith(why)


@for_each(
    ("step", "why"),
    [
        # An operand that did not come from a cast is transposed.
        (lambda setup, x: setup.arithmetic.turn(Operand(x.clone()), x, Role.WEIGHT), "was not made by a cast"),
        (lambda setup, x: x.clone(), "no cast was seen"),
    ],
)
def test_what_was_not_followed_is_no_figure(
    step: Callable[[Setup, torch.Tensor], object], why: str, bench: Bench, script: Script
) -> None:
    x = torch.randn(TOKENS, WIDTH)
    use = bench.memory(script(lambda setup: setup, lambda setup, phase: step(setup, x), precision="fp8"), CPU)
    assert isinstance(use, MemoryUse) and use.on_device is None and why in use.off_device


STRETCH: list[tuple[str, list[Event], int]] = [
    ("a temporary of a cast", [EmulationStart(), MemoryChange(1, 9), MemoryChange(1, -9), EmulationEnd()], 100),
    ("what a cast leaves", [EmulationStart(), MemoryChange(1, 9), EmulationEnd()], 109),
    ("what is replaced", [EmulationStart(), MemoryChange(1, 9), Laid(5, 3), EmulationEnd((1,))], 103),
    (
        "what is laid lives on",
        [EmulationStart(), MemoryChange(1, 9), Laid(5, 3), EmulationEnd((1,)), MemoryChange(1, -9), MemoryChange(2, 4)],
        107,
    ),
    ("what is lifted does not", [Laid(5, 3), Lifted(5), MemoryChange(2, 2)], 103),
    ("a source that is kept", [Laid(5, 0, 7), MemoryChange(7, -100), MemoryChange(2, 8)], 108),
    ("a source that is let go", [Laid(5, 0, 7), MemoryChange(7, -100), Lifted(5), MemoryChange(2, 8)], 100),
    (
        "twice kept, once let go",
        [Laid(5, 0, 7), Laid(6, 0, 7), MemoryChange(7, -100), Lifted(5), MemoryChange(2, 8)],
        108,
    ),
    ("laid where nothing lies", [Laid(5, 0, 99), Lifted(5), Lifted(6), MemoryChange(2, 8)], 108),
    ("an address that is used again", [MemoryChange(7, 50), MemoryChange(2, 8)], 100),
    ("what the allocator has no more", [LiveAllocationAddresses(frozenset()), MemoryChange(2, 8)], 100),
]


@for_each(("events", "peak"), [(events, peak) for _, events, peak in STRETCH], ids=[row[0] for row in STRETCH])
def test_a_stretch(events: list[Event], peak: int) -> None:
    stretch = find_memory_course([MemoryChange(7, 100), PhaseStart("gemm"), *events, EmulationStart(), EmulationEnd()])
    assert stretch is not None and stretch.on_device == peak
    silent = find_memory_course([MemoryChange(7, 100), PhaseStart("gemm")])
    assert silent is not None and silent.on_device is None, "without notes there are zero bytes"
