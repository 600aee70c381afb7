"""Planted costs of options are recovered: additive ones as additive, others as interacting."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fp8bench.errors import UnknownName
from fp8bench.features.ablate.kind import AblationKind
from fp8bench.features.ablate.run import parse_options, plan_arms
from fp8bench.features.ablate.values import AblatedArm, AblatedOption, Ablation, iterate_arms
from fp8bench.features.ablate.view import (
    OptionSavings,
    describe_results,
    encode_ablation_result,
    list_rows,
    measure_arm_seconds,
)
from fp8bench.model import Interval, Level, Request
from fp8bench.model.codec import decode, encode
from tests.commands import Say, unfolded
from tests.counts import for_each
from tests.facts import CPU
from tests.own_suites import adding_up, forgotten

NAMES = ("a", "b", "c")
SAVES = {"a": 2e-3, "b": 1e-3, "c": -0.5e-3}


def additive(options: Sequence[str]) -> float:
    return 10e-3 - sum(SAVES[name] for name in options)


def interacting(options: Sequence[str]) -> float:
    """`b` has an effect only together with `a`."""
    return additive([name for name in options if name != "b" or "a" in options])


def ablation(cost: Callable[[Sequence[str]], float], seed: int = 0, rounds: int = 60) -> Ablation:
    """Rounds with noise per round and noise per slot."""
    draw = np.random.default_rng(seed)
    common = 1 + 0.02 * draw.gamma(1.0, size=rounds)
    arms = []
    for options in iterate_arms(NAMES):
        seconds = cost(options) * common * (1 + 0.01 * draw.gamma(1.0, size=rounds))
        arms.append(AblatedArm(options, "/".join(options) or "none", rounds=tuple(seconds.tolist())))
    control = additive(()) * common * (1 + 0.01 * draw.gamma(1.0, size=rounds))
    options = tuple(AblatedOption(name, axis=name, on="yes", off="no") for name in NAMES)
    seconds = tuple(control.tolist())
    return Ablation("planted", (), "cpu", "a machine", "fp32", options, tuple(arms), control=seconds)


def holds(interval: Interval | None, truth: float) -> bool:
    assert interval is not None
    return interval.low <= truth <= interval.high


def test_each_option_is_measured_alone_and_left_out() -> None:
    assert [len(list(iterate_arms("abcd"[:count]))) for count in (2, 3, 4)] == [4, 8, 11]
    assert next(iterate_arms(NAMES)) == () and len(set(iterate_arms(NAMES))) == 8


@for_each(
    ("suite", "options", "axis", "values"),
    [
        ("vision", ("channels_last", "bf16"), "layout", ("contiguous", "channels_last")),
        ("decode", ("static-kv", "bf16"), "static", ("no", None)),
        ("transformer", ("fused-optimizer", "bf16"), "fused", ("no", None)),
    ],
)
def test_a_named_option_sets_its_axis_alone(
    suite: str, options: tuple[str, ...], axis: str, values: tuple[str | None, ...]
) -> None:
    axes = {"vision": (("model", ("resnet",)),), "decode": (("size", ("nano",)), ("context", ("64",)))}
    request = Request(suite, ("fp32",), ("cpu",), axes=axes.get(suite, ()))
    arms = plan_arms(request, parse_options(suite, options, CPU), (CPU,), None)
    params = [dict(arm.case.params) for arm in arms.values()]
    found = [(arm.case.precision, one.pop(axis, None)) for arm, one in zip(arms.values(), params, strict=True)]
    assert found == [("fp32", value) for value in values] + [("bf16", value) for value in values]
    assert all(one == params[0] for one in params)
    with pytest.raises(UnknownName, match=options[0]):
        parse_options("gemm", options, CPU)


def test_additive_costs_come_out_additive() -> None:
    inside = calls = 0
    for seed in range(14):
        known = ablation(additive, seed)
        savings, scale = OptionSavings(known), (measure_arm_seconds(known.arms[0]) or 0) / additive(())
        for name, saved in SAVES.items():
            for saving in savings.compute_option_savings(name).values():
                inside, calls = inside + holds(saving, scale * saved), calls + 1
        assert holds(savings.measure_interaction(), 0.0)
        assert any("additive within these rounds" in sentence for sentence in describe_results(known))
    assert calls >= 40 and inside == calls


def test_an_ablation_is_read_back_and_has_a_row_for_each_arm() -> None:
    known = ablation(interacting)
    assert (
        decode(Ablation, encode(known)) == known and list_rows(known)[0][0] == "arm" and len(list_rows(known)[1]) == 8
    )
    assert set(encode_ablation_result(known)["saved"]["options"]) == set(NAMES)


def test_options_that_need_one_another_are_reported_as_interacting() -> None:
    for seed in range(10):
        known = ablation(interacting, seed)
        savings = OptionSavings(known)
        assert not holds(savings.measure_interaction(), 0.0)
        told = "; ".join(describe_results(known))
        assert "they need one another" in told
        savings_of_b = savings.compute_option_savings("b")
        assert holds(savings_of_b["alone"], 0.0) and not holds(savings_of_b["left_out"], 0.0)


def test_arms_without_speed_have_no_saving_and_few_rounds_no_interval() -> None:
    known = ablation(additive)
    emulated = (replace(arm, level=Level.EMULATED) if "a" in arm.options else arm for arm in known.arms)
    low = replace(known, arms=tuple(emulated))
    assert (
        OptionSavings(low).compute_option_savings("a")["alone"] is None
        and OptionSavings(low).compute_option_savings("b")["left_out"] is None
    )
    assert OptionSavings(low).compute_option_savings("b")["alone"] is not None and any(
        "no speed" in sentence for sentence in describe_results(low)
    )
    few = OptionSavings(ablation(additive, rounds=10)).compute_option_savings("a")["alone"]
    assert few is not None and few.level == 0 and few.low < 2e-3 < few.high
    for first in (replace(known.arms[0], level=Level.EMULATED), replace(known.arms[0], why="throttled")):
        none = replace(known, arms=(first, *known.arms[1:]))
        (told,) = describe_results(none)
        assert told.startswith("speed is unknown") and OptionSavings(none).compute_option_savings("a")["alone"] is None


def test_a_saving_within_the_noise_floor_is_not_claimed() -> None:
    """Identical code differs by 30% here, so a fifth faster is not evidence."""
    known = ablation(lambda options: 10e-3 * (1.2 if options == NAMES else 1.0))
    assert ": slower" in next(iter(describe_results(known)))
    loud = replace(known, control=tuple(1.3 * seconds for seconds in known.control))
    assert ": not told apart" in next(iter(describe_results(loud)))


@for_each(
    ("words", "says"),
    [
        ("transformer --options bf16", "two or more"),
        ("transformer --options bf16,fp16", "precisions, and a step has only one"),
        ("transformer --options batch=2,batch=4", "values of batch"),
        ("transformer --options bf16,compil", "Did you mean 'compile'?"),
        ("transformer --options bf16,batch=many", "many"),
        ("gemm --options bf16,product=backward", "Choose one, as in --set"),
        ("nothing --options bf16,compile", "unknown suite 'nothing'"),
    ],
)
def test_bad_arguments_are_refused(words: str, says: str, fp8bench: Say, tmp_path: Path) -> None:
    code, out, err = fp8bench("ablate", *words.split(), "--no-isolation", "--store", str(tmp_path / "store"))
    assert (code, out) == (2, "") and says in unfolded(err)
    assert not (tmp_path / "store" / "ablations").exists()


SUITE = """
import time
import torch
from fp8bench.protocols.axes import one_of
from fp8bench.suites import Axis, Work, Workload, workloads

@workloads.register("planted")
class Planted(Workload):
    name, summary, dtypes = "planted", "does what its options say", ("fp32",)

    def axes(self, facts):
        return tuple(Axis(name, "", ("no",), one_of("no", "yes")) for name in ("first", "second"))

    def work(self, params):
        return Work(tokens=64)

    def prepare(self, setup):
        return (*(setup.case.param(name) == "yes" for name in ("first", "second")), torch.randn(64, 64))

    def step(self, state, phase):
        first, second, values = state
        BODY
"""
SKIPS = """for _ in range(1 if first else 2):
            with phase.gemm:
                values @ values"""
WAITS = """until = time.perf_counter() + 0.0008 - 0.0003 * first - 0.0003 * (first and second)
        while time.perf_counter() < until:
            pass"""


def ablated(fp8bench: Say, folder: Path, body: str, rounds: int, *more: str) -> Any:
    (folder / "planted.py").write_text(SUITE.replace("BODY", body))
    words = (str(folder / "planted.py"), "--options", "first=yes,second=yes", "--rounds", str(rounds), *more)
    with forgotten(folder):
        code, out, err = fp8bench("ablate", *words, "--json", "--store", str(folder / "store"))
    assert code == 0, err
    return json.loads(out)


def test_a_file_is_accepted_in_place_of_its_suite(fp8bench: Say, tmp_path: Path) -> None:
    assert ablated(fp8bench, tmp_path, WAITS, 1, "--no-isolation")["suite"] == "planted"
    two = tmp_path / "two.py"
    two.write_text(SUITE.replace("BODY", SKIPS) + adding_up("second", 1))
    with forgotten(tmp_path):
        code, _, err = fp8bench("ablate", str(two), "--options", "first=yes,second=yes")
    assert code == 2 and "is 2 suites" in unfolded(err) and "such as planted" in unfolded(err)


@pytest.mark.slow
def test_an_arm_that_does_less_has_no_speed_up(fp8bench: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8BENCH_TAPE", "recorded")
    document = ablated(fp8bench, tmp_path, SKIPS, 4)
    less = {tuple(arm["options"]) for arm in document["arms"] if "different work" in arm["why"]}
    assert less == {("first=yes",), ("first=yes", "second=yes")}
    assert document["saved"]["options"]["first=yes"]["alone"] is None


@pytest.mark.slow
def test_planted_waiting_is_found(fp8bench: Say, tmp_path: Path) -> None:
    saved, half = ablated(fp8bench, tmp_path, WAITS, 24)["saved"]["options"], 0.15e-3
    assert saved["first=yes"]["alone"]["point"] > half > saved["second=yes"]["alone"]["point"]
    assert saved["second=yes"]["cumulative"]["point"] > half
    (path,) = (tmp_path / "store" / "ablations").glob("*/ablation.json")
    assert AblationKind().find("nothing", tmp_path / "store") is None
    _, shown, _ = fp8bench("show", str(path), "--store", str(tmp_path / "store"))
    assert "second=yes" in shown and "left out" in shown


@pytest.mark.nightly
def test_a_static_cache_and_a_fused_optimizer_are_measured(fp8bench: Say, tmp_path: Path) -> None:
    for words in ("decode --options static-kv,batch=2", "transformer --options fused-optimizer,checkpointing"):
        more = ("--reference", "fp32", "--rounds", "2", "--json", "--store", str(tmp_path / "store"))
        code, out, err = fp8bench("ablate", *words.split(), *more)
        assert code == 0, err
        assert all(arm["rounds"] and not arm["why"] for arm in json.loads(out)["arms"])
