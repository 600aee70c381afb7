"""Rows that exit early: which ones, the cost of the others, and the label for less work."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as functional

from fp8bench.analysis.claims import label_false_claims
from fp8bench.devices.cpu import HostStamper
from fp8bench.errors import UsageError
from fp8bench.model import Label, Level, Record, Scalar, Status, Tape
from fp8bench.nn.early_exit import EarlyExit
from fp8bench.protocols import Setup, SilentPhases
from fp8bench.registry import precisions
from fp8bench.worker.tape_pass import record_tape
from fp8bench.workloads.early_exit import EarlyExits
from tests.workloads.steps import CPU, SMALL, phases, small

SIZES = SMALL["early_exit"]


def setup_for(precision: str = "fp32", seed: int = 0, **changes: Scalar) -> Setup:
    return small("early_exit", precision, seed, **changes)


def depths(setup: Setup) -> list[int]:
    state = EarlyExits().prepare(setup)
    assert isinstance(state.layer, EarlyExit)
    return [int(depth) for depth in state.layer.count_blocks(*state.inputs)]


def by_hand(setup: Setup) -> tuple[torch.Tensor, list[int]]:
    """Row by row in fp64, with the state's thresholds: the logits, and the blocks that each row took."""
    state = EarlyExits().prepare(setup)
    weights = [(block.up.weight, block.down.weight) for block in state.layer.blocks]
    logits = []
    taken = []
    for given in state.inputs[0].detach().double():
        row = given
        for number, (up, down) in enumerate(weights):
            inside = functional.rms_norm(row, row.shape)
            row = row + functional.gelu(inside @ up.double().t(), approximate="tanh") @ down.double().t()
            found = functional.rms_norm(row, row.shape) @ state.layer.head.double().t()
            last = number == len(weights) - 1
            if last or found.softmax(-1).max() >= state.layer.exit_rule.confidence_thresholds[number]:
                break
        logits.append(found)
        taken.append(number + 1)
    return torch.stack(logits), taken


def test_rows_leave_where_a_head_is_sure_of_them() -> None:
    setup = setup_for(exits="own")
    wanted, taken = by_hand(setup)
    state = EarlyExits().prepare(setup)
    torch.testing.assert_close(state.outcome()[0].double(), wanted, rtol=1e-4, atol=1e-4)
    assert depths(setup) == taken and len(set(taken)) == 4


@pytest.mark.parametrize("leaving", [1, 25, 50, 90])
@pytest.mark.parametrize("tokens", [1, 7, 48])
def test_as_many_leave_by_schedule_as_in_the_exact_pass(tokens: int, leaving: int) -> None:
    own, held = (setup_for(exits=exits, tokens=tokens, leaving=leaving) for exits in ("own", "held"))
    assert sorted(depths(own)) == sorted(depths(held))
    assert depths(held) == depths(setup_for("mxfp4", tokens=tokens, leaving=leaving))
    if tokens == 48 and leaving == 25:
        assert depths(held) != depths(setup_for(seed=1))
        assert [depths(held).count(block) for block in (1, 2, 3, 4)] == [12, 9, 7, 20]


def tape(precision: str, **changes: Scalar) -> Tape:
    setup = setup_for(precision, **changes)
    return record_tape(EarlyExits(), setup, precisions.get(precision), HostStamper())


@pytest.mark.parametrize("exits", ["held", "own"])
@pytest.mark.parametrize("precision", ["fp32", "mxfp4"])
def test_the_tape_has_the_products_of_the_rows_that_were_there(precision: str, exits: str) -> None:
    width, hidden, classes = (int(SIZES[name]) for name in ("width", "hidden", "classes"))
    each = 2 * (2 * width * hidden + width * classes)
    changes: dict[str, Scalar] = {"exits": exits, "tokens": 256, "depth": 6}
    found = tape(precision, **changes)
    assert found.flops == each * sum(depths(setup_for(precision, **changes))) and not found.unknown
    declared = EarlyExits().work(dict(setup_for(precision, **changes).case.params)).flops
    assert (declared == found.flops) == (exits == "held" or precision == "fp32")


def record(precision: str, **changes: Scalar) -> Record:
    setup = setup_for(precision, **changes)
    support = precisions.get(precision).support(CPU)
    work = EarlyExits().work(dict(setup.case.params))
    return Record(setup.case, support, Status.OK, work, tape=tape(precision, **changes))


def mismatch(own: Record, reference: Record) -> tuple[bool, str] | None:
    told = [one for one in label_false_claims(own, reference) if one.label is Label.WORK_MISMATCH]
    return (told[0].hard, told[0].reason) if told else None


def test_less_work_is_labelled() -> None:
    """A different product is a doubt; more than 5% fewer FLOPs remove the verdict. Held exits do the same work."""
    more: dict[str, Scalar] = {"tokens": 256, "depth": 6, "exits": "own"}
    reference = record("fp32", **more)
    low = record("mxfp4", **more)
    told = mismatch(low, reference)
    assert told is not None and not told[0] and "its products do" in told[1]
    held = [record(name, **{**more, "exits": "held"}) for name in ("fp32", "mxfp4")]
    assert mismatch(held[1], held[0]) is None and held[0].tape is not None and held[1].tape is not None
    assert held[0].tape.flops == held[1].tape.flops
    # Planted: an arm whose rows exit twice as early.
    sooner = record("bf16", **{**more, "leaving": 50})
    told = mismatch(sooner, reference)
    assert told is not None and told[0]
    # In a suite whose steps do not depend on numbers, such a small difference is rounding of shapes.
    other = [replace(one, case=replace(one.case, workload="mlp")) for one in (low, reference)]
    assert mismatch(*other) is None


def test_errors_say_where_rows_leave_otherwise() -> None:
    held, own = (EarlyExits().error(setup_for("mxfp4", exits=exits, tokens=256)) for exits in ("held", "own"))
    assert held["exits_differ_percent"] == 0 < own["exits_differ_percent"] < 60
    assert 0 < held["output_error"] < own["output_error"] and held["mean_depth"] != own["mean_depth"]
    exact = EarlyExits().error(setup_for("fp32", exits="own"))
    assert exact["exits_differ_percent"] == 0 and exact["output_error"] < 1e-5


def test_a_held_step_looks_as_sure_as_one_that_chooses() -> None:
    """It runs the same operators except the choice, and reads nothing back."""
    calls = {exits: {one.operator for one in tape("fp32", exits=exits).operators} for exits in ("held", "own")}
    assert calls["own"] - calls["held"] <= {"nonzero", "lt", "squeeze"} and "_softmax" in calls["held"]
    assert set(phases(EarlyExits(), setup_for("bf16"))) == {"elementwise", "cast", "gemm"}


def test_rows_that_are_equally_sure_are_a_sentence() -> None:
    with pytest.raises(UsageError, match="the same confidence"):
        EarlyExits().prepare(setup_for(exits="own", width=1))
    for exits, level in (("own", Level.REFUSED), ("held", Level.NATIVE)):
        params = dict(setup_for(exits=exits, values="ones").case.params)
        assert EarlyExits().support(params, precisions.get("fp32"), CPU).level is level


def test_all_rows_may_be_gone_ahead_of_the_last_block() -> None:
    state = EarlyExits().prepare(setup_for(exits="own"))
    state.layer.exit_rule = state.layer.exit_rule._replace(confidence_thresholds=(0.0,) * 3)
    assert set(state.layer.count_blocks(*state.inputs).tolist()) == {1}
    state.layer.exit_rule = state.layer.exit_rule._replace(confidence_thresholds=(math.inf,) * 3)
    assert set(state.layer.count_blocks(*state.inputs).tolist()) == {4}
    state.step(SilentPhases())
