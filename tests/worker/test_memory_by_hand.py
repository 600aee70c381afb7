"""Roles of a step's memory: in a network counted by hand, in every suite, and by a second method."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8bench.model import Case, MemoryRole, MemoryUse, Request
from fp8bench.plan.make import make_plan
from fp8bench.protocols import Phases, Role, Setup
from fp8bench.worker.bench import Bench
from tests.counts import sampled
from tests.worker.scripted import CPU, Script
from tests.worker.scripted import script as script

R = MemoryRole
TOKENS, WIDTH, HIDDEN, OUT = 32, 8, 16, 4


class Network:
    """Two fp32 layers with ReLU between them, whose every tensor can be counted."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.up = torch.nn.Parameter(torch.randn(WIDTH, HIDDEN))
        self.down = torch.nn.Parameter(torch.randn(HIDDEN, OUT))
        self.x = torch.randn(TOKENS, WIDTH)
        self.pull = torch.randn(TOKENS, OUT)
        self.optimizer = torch.optim.SGD([self.up, self.down], lr=0.1, momentum=0.9, foreach=False)
        self.fails_at = 0
        self.steps = 0

    def memory_roles(self) -> Mapping[MemoryRole, object]:
        return {R.DATA: self.x, R.GRADIENTS: self.pull}

    def step(self, phase: Phases) -> None:
        self.steps += 1
        if self.steps == self.fails_at:
            with phase.gemm:
                raise MemoryError("planted")
        with phase.gemm:
            hidden = self.x @ self.up
        with phase.elementwise:
            hidden = hidden.relu()
        with phase.gemm:
            y = hidden @ self.down
        del hidden
        with phase.elementwise:
            y.backward(self.pull)
        with phase.optimizer_step:
            torch.empty(256)
            self.optimizer.step()
            self.optimizer.zero_grad()


def measured(bench: Bench, case: Case) -> MemoryUse:
    use = bench.memory(case, CPU)
    assert isinstance(use, MemoryUse)
    assert sum(size for _, size in use.roles) == use.peak == max(phase.allocated for phase in use.phases)
    return use


def test_a_network_of_two_layers(bench: Bench, script: Script) -> None:
    """The peak is in ReLU's backward: weights and momentum; the input; ReLU's saved output, and the output.

    The incoming gradient, ReLU's output gradient, its input gradient, and that of the second weight. In the optimizer's
    phase both weights have gradients, and only the state remains besides.
    """
    use = measured(bench, script(Network))
    weights = 4 * (WIDTH * HIDDEN + HIDDEN * OUT)
    layer = 4 * TOKENS * HIDDEN
    output = 4 * TOKENS * OUT
    second = 4 * HIDDEN * OUT
    assert dict(use.roles) == {
        "weights": weights,
        "gradients": output + 2 * layer + second,
        "optimizer": weights,
        "activations": layer + output,
        "data": 4 * TOKENS * WIDTH,
    }
    state = 2 * weights + 4 * TOKENS * WIDTH + output
    phases = {phase.phase: phase.allocated for phase in use.phases}
    assert phases["optimizer_step"] == state + weights + output + 1024  # the output lives as long as the step
    assert phases["gemm"] == state + layer + output and phases["elementwise"] == use.peak
    assert list(phases) == ["unattributed", "gemm", "elementwise", "optimizer_step"]
    assert all(phase.reserved is None for phase in use.phases) and use.reserved is use.process is None


class Casting:
    """A product with its casts that does not declare its tensors' roles."""

    def __init__(self, setup: Setup) -> None:
        self.arithmetic = setup.arithmetic
        self.x = torch.randn(TOKENS, WIDTH)
        self.w = torch.randn(HIDDEN, WIDTH)

    def step(self, phase: Phases) -> None:
        a = self.arithmetic.cast(self.x, Role.INPUT)
        b = self.arithmetic.cast(self.w, Role.WEIGHT)
        self.arithmetic.product(a, b, torch.bfloat16)


def test_what_is_cast_says_what_it_is(bench: Bench, script: Script) -> None:
    x = TOKENS * WIDTH
    w = HIDDEN * WIDTH
    use = measured(bench, script(Casting, precision="bf16"))
    known = {"weights": 4 * w, "low_precision_weights": 2 * w, "activations": 4 * x, "low_precision_activations": 2 * x}
    assert {role: size for role, size in use.roles if role != "workspace"} == known
    assert dict(use.roles)["workspace"] >= 2 * TOKENS * HIDDEN
    use = measured(bench, script(Casting))
    assert {role for role, _ in use.roles} == {"weights", "activations", "workspace"}


class Threaded(Network):
    """Makes its product up in a thread of Python's, in a phase."""

    def step(self, phase: Phases) -> None:
        def work() -> None:
            with phase.data_load:
                torch.empty(100)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        super().step(phase)


SMALL: dict[str, Mapping[str, str]] = {
    "gemm": {"shape": "64x48x32"},
    "mlp": {"tokens": "32", "width": "64", "hidden": "128"},
    "moe": {"tokens": "64", "width": "64", "hidden": "128", "load": "zipf:1"},
    "diffusion": {"image": "4", "width": "64", "pass": "training"},
    "norm_act": {"tokens": "32", "width": "64", "operation": "residual"},
    "accumulate": {"width": "64", "tensors": "3", "micro_batches": "2"},
    "optimizer": {"width": "64", "tensors": "3"},
    "cast": {"shape": "64"},
    "attention": {"sequence": "32", "heads": "2", "head_width": "32"},
    "conv": {"channels": "8", "batch": "2", "image": "8"},
    "data": {"record": "256", "batch": "8"},
    "transformer": {"size": "nano", "batch": "1", "sequence": "32"},
    "learning": {"width": "32"},
    "vision": {"model": "resnet", "layout": "channels_last", "batch": "2", "image": "16", "width": "32"},
    "numerics": {"tensor": "outliers", "rows": "64", "columns": "64"},
}
# Their weights are sent converted.
CONVERTED = ("mlp", "transformer", "conv")
TRAINED = {"weights", "gradients", "activations"}
# Minimum contents at the peak in fp32.
EXPECTED = {
    "gemm": {"weights", "activations"}, "mlp": TRAINED, "moe": TRAINED, "norm_act": {"activations"},
    "diffusion": TRAINED, "accumulate": {"gradients"},
    "optimizer": {"weights", "gradients", "optimizer"}, "cast": {"activations"},
    "attention": {"gradients", "activations"}, "conv": TRAINED, "data": {"data"},
    "transformer": TRAINED | {"optimizer"}, "numerics": set(),
    "learning": TRAINED | {"optimizer"}, "vision": TRAINED | {"optimizer"},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "precision"),
    [
        *((name, "fp8") for name in SMALL),
        *((name, "bf16") for name in CONVERTED),
        *sampled([], [(name, "fp32") for name in SMALL]),
    ],
)
def test_every_suite_knows_what_its_memory_is_for(name: str, precision: str, bench: Bench) -> None:
    axes = tuple((axis, (value,)) for axis, value in SMALL[name].items())
    for group in make_plan(Request(name, (precision,), ("cpu",), axes=axes), (CPU,)).groups:
        for planned in group.cases:
            if planned.skip:
                continue
            use = measured(bench, planned.case)
            found = dict(use.roles)
            assert found.get("other", 0) <= 0.01 * use.peak, found
            if precision == "fp32":
                assert set(found) >= EXPECTED[name] and not any("low" in role for role in found), found
            elif name in CONVERTED:
                assert found["low_precision_weights"] > 0


def test_a_step_that_fails_in_the_middle_leaves_nothing_and_threads_do_no_harm(bench: Bench, script: Script) -> None:
    def failing(setup: Setup) -> Network:
        network = Network(setup)
        network.fails_at = 2
        return network

    whole = measured(bench, script(Network))
    with pytest.raises(MemoryError, match="planted"):
        bench.memory(script(failing), CPU)
    assert not torch.autograd._profiler_enabled() and gc.isenabled()
    again = measured(bench, script(Network))
    threaded = measured(bench, script(Threaded))
    assert (again.peak, again.roles, again.phases) == (whole.peak, whole.roles, whole.phases)
    assert threaded.roles == whole.roles


def test_a_state_that_is_kept_is_given_back_when_it_is_released(bench: Bench, script: Script) -> None:
    seen: list[weakref.ref[Tensor]] = []

    def noting(setup: Setup) -> Network:
        network = Network(setup)
        seen.append(weakref.ref(network.x))
        return network

    case = script(noting)
    bench.memory(case, CPU)
    bench.memory(case, CPU, "key")
    assert seen[0]() is None and seen[1]() is not None
    assert bench.release("key") == () == bench.release("key")
    assert seen[1]() is None


def test_garbage_does_not_count_and_a_state_that_refers_to_itself_is_given_back(bench: Bench, script: Script) -> None:
    """A cycle is freed by explicit collection instead of by chance."""
    seen: list[weakref.ref[torch.Tensor]] = []

    def prepare(setup: Setup) -> list[Any]:
        state: list[Any] = [torch.empty(100)]
        state.append(state)
        seen.append(weakref.ref(state[0]))
        return state

    def step(state: list[Any], phase: Phases) -> None:
        cycle: list[Any] = [torch.empty(500)]
        cycle.append(cycle)

    case = script(prepare, step)
    assert [measured(bench, case).peak for _ in range(3)] == [2400] * 3 and gc.isenabled()
    assert [state() for state in seen] == [None] * 3
