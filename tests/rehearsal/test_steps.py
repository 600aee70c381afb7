"""Whole steps of every workload, at a GPU's sizes, in all precisions that it has units for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
from _pytest.mark import ParameterSet
from torch import Tensor

from fp8bench.formats.product_rules import Product
from fp8bench.formats.recipes import Recipe
from fp8bench.model import Case, DeviceFacts, Level, PlannedCase, Request
from fp8bench.nn import experts, sizes
from fp8bench.nn.served import OWN, check_served_support
from fp8bench.numerics.operands import explain_host_dependence
from fp8bench.plan.corpus import Corpus
from fp8bench.plan.make import make_plan
from fp8bench.protocols import Role, SilentPhases
from fp8bench.registry import precisions, workloads
from tests.contracts import test_modes
from tests.facts import B200, H200, MI300X
from tests.rehearsal.ceilings import GROUPED, of_phases
from tests.rehearsal.stage import Stage

GPUS = {"H200": H200, "B200": B200, "MI300X": MI300X}
# Every precision with default options, and with others.
MODES = tuple(dict.fromkeys((*precisions.names(), *test_modes.MODES, "fp8:gw=bf16", "fp8-rowwise:formats=hybrid")))
# Axis values that differ in layouts or multiples; few of them where they are similar.
AXES: dict[str, dict[str, tuple[str, ...]]] = {
    "accumulate": {"micro_batches": ("2",), "tensors": ("2",)},
    "attention": {"sequence": ("1024",), "part": ("layer",), "key_heads": ("4",)},
    "cast": {"role": ("input", "gradient"), "layout": ("contiguous", "transposed", "strided")},
    "conv": {"channels": ("256",)},
    "data": {"batch": ("4",), "record": ("4096",)},
    "decode": {"batch": ("1", "16"), "context": ("4096",)},
    "diffusion": {"denoiser": ("dit",), "layers": ("1",), "steps": ("2",)},
    "early_exit": {"tokens": ("256",), "width": ("256",), "hidden": ("512",), "exits": ("held",)},
    "gemm": {
        "shape": ("1x8192x8192", "16384x2048x4096", "1000"),
        "product": tuple(sizes.OPERAND_ROLES),
        "layout": ("contiguous", "strided/transposed"),
    },
    "learning": {},
    "mlp": {"gated": ("yes",)},
    "moe": {
        "tokens": ("1024",),
        "experts": ("8",),
        "top_k": ("2",),
        "load": ("uniform", "zipf:1"),
        "pass": ("training", "decode"),
    },
    "norm_act": {},
    "numerics": {"tensor": ("gaussian", "log-normal")},
    "optimizer": {"width": ("4096",), "tensors": ("2",)},
    "prefill": {"batch": ("2",)},
    "transformer": {"checkpointing": ("blocks",)},
    "vision": {"layers": ("1",)},
}
STORES = ("accumulate", "cast", "data", "numerics", "optimizer")
PRODUCTS = ("attention", "gemm", "mlp")
SERVED = ("decode", "prefill")
# All blocks of a model are equal.
BLOCKS = 1
# CDNA3 has different formats.
ON_MI300X = {"e4m3fn": "e4m3fnuz", "e5m2": "e5m2fnuz"}


def leaves(workload: str, mode: str) -> bool:
    if precisions.get(mode).unit_scaled and not workloads.get(workload).unit_scales:
        return True
    if workload in SERVED:
        params = {"size": "llama-1b", "kv": OWN, "weights": OWN}
        return check_served_support(params, precisions.get(mode), H200).level is Level.REFUSED
    if workload == "norm_act":
        return bool(precisions.get(mode).carried_by)
    return (mode == "tf32" and workload in STORES) or (mode == "fp32" and workload == "numerics")


def modes_of(level: Level, facts: DeviceFacts) -> list[str]:
    return [mode for mode in MODES if precisions.get(mode).support(facts).level is level]


def cases() -> Iterator[ParameterSet]:
    """Single products by the rules of every GPU; other suites and whole models on the first GPU with the precision.

    By default all of the MLP, every tenth of the others, and one of vision, which take seconds.
    """
    taken: set[tuple[str, str]] = set()
    for gpu, facts in GPUS.items():
        for mode in modes_of(Level.NATIVE, facts):
            for workload in AXES:
                dear = workload in ("learning", "transformer", "vision", *SERVED) and mode not in precisions.names()
                if (workload in PRODUCTS or (workload, mode) not in taken) and not dear and not leaves(workload, mode):
                    taken.add((workload, mode))
                    few = workload == "mlp" or ([*AXES].index(workload) + MODES.index(mode)) % 10 == 0
                    few = mode == "fp8-e4m3" if workload == "vision" else few
                    yield pytest.param(gpu, workload, mode, marks=() if few else pytest.mark.nightly)


@pytest.fixture(autouse=True)
def few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for known, size in ((sizes.SIZES, "gpt2-124m"), (sizes.SERVED_SIZES, "llama-1b")):
        monkeypatch.setitem(known, size, replace(known[size], layers=BLOCKS))


def cases_of(workload: str, mode: str, facts: DeviceFacts, corpus: Corpus) -> list[PlannedCase]:
    axes = dict(AXES[workload])
    if workload == "moe" and mode.startswith(
        "fp8-block"
    ):  # torch's shape function rejects partial blocks, its kernel does not
        axes["load"] = ("uniform",)
    request = Request(workload, (mode,), axes=tuple(axes.items()))
    plan = make_plan(request, (facts,), corpus.identity, compares=False)
    return [one for group in plan for one in group.cases if one.runs]


def expected(case: Case, gpu: str) -> Counter[tuple[str, str, str]]:
    """The scaled products of a step: their kind, and the formats of their operands."""
    recipe, params = getattr(precisions.get(case.precision), "recipe", None), dict(case.params)
    found = Counter[tuple[str, str, str]]()
    if not isinstance(recipe, Recipe):
        return found
    treatments = dict(zip((Role.INPUT, Role.WEIGHT, Role.GRADIENT), recipe.treatments, strict=True))
    of_model = 4 * BLOCKS * int(params.get("micro_batches", 0))
    experts = 2 * (1 if case.precision in GROUPED else int(params.get("experts", 0)))
    layers = {"attention": 2, "conv": 2, "learning": 8, "mlp": 2, "moe": experts, "transformer": of_model}
    layers |= dict.fromkeys(SERVED, 4 * BLOCKS)
    layers["early_exit"] = 2 * int(params.get("depth", 0))
    # Convolutions as matrices with rotated operands; blocks of both, and the layers between.
    layers["vision"] = {"resnet": 4, "vit": 4, "two-input": 9}.get(str(params.get("model")), 0)
    layers["diffusion"] = 4 * int(params.get("steps", 0))
    for product, roles in sizes.OPERAND_ROLES.items():
        forward = case.workload in (*SERVED, "diffusion", "early_exit") or params.get("pass") == "decode"
        if forward and product != "forward":
            continue
        count = int(params["product"] == product) if case.workload == "gemm" else layers.get(case.workload, 0)
        if product == "forward" and params.get("checkpointing") == "blocks":
            count *= 2
        if not (product == "weight-gradient" and recipe.high_weight_gradient):
            a, b = (treatments[role] for role in roles)
            names = (ON_MI300X[one.fmt.name] if gpu == "MI300X" else one.fmt.name for one in (a, b))
            found[str(Product(1, 1, 1, a, b).scheme), *names] += count
    return +found


def test_every_suite_is_rehearsed() -> None:
    assert {*AXES} == {*workloads.names()}


@pytest.mark.parametrize(("gpu", "workload", "mode"), [*cases()])
def test_a_step_is_what_a_gpu_takes(gpu: str, workload: str, mode: str, stage: Stage, corpus: Corpus) -> None:
    planned = cases_of(workload, mode, GPUS[gpu], corpus)
    assert planned
    for one in planned:
        done = stage.second_step(one.case, GPUS[gpu])
        assert not done.phases["unattributed"], one.case.id
        if one.support.level is Level.EMULATED:  # torch has no such convolution
            assert workload in ("conv", "vision") and not done.products, one.case.id
            continue
        found = Counter((str(product.scheme), product.a.fmt.name, product.b.fmt.name) for product in done.products)
        assert found == expected(one.case, gpu), one.case.id
        most = of_phases(one.case)
        if precisions.get(mode).unit_scaled:  # its constants are separate launches, only in these phases
            most = {phase: count for phase, count in most.items() if phase not in ("elementwise", "attention")}
        assert {phase: done.phases[phase] for phase in most if done.phases[phase] > most[phase]} == {}, one.case.id


@pytest.mark.parametrize("mode", modes_of(Level.EMULATED, H200))
def test_an_emulated_step_waits_for_nothing(mode: str, stage: Stage, corpus: Corpus) -> None:
    (one,) = cases_of("mlp", mode, H200, corpus)
    done = stage.second_step(one.case, H200)
    assert one.support.level is Level.EMULATED and done.phases["cast"] and not done.products


@pytest.mark.parametrize(
    "kept",
    [
        "kv=fp8",
        "kv=fp8-head",
        "kv=fp8-token",
        "kv=mxfp4",
        "kv=nvfp4",
        "weights=int8",
        "weights=int4",
        "weights=fp8",
        "weights=nvfp4:activations=low",
    ],
)
def test_a_step_of_what_is_kept_low_waits_for_nothing(kept: str, stage: Stage, corpus: Corpus) -> None:
    (one,) = [one for one in cases_of("decode", f"served:{kept}", H200, corpus) if dict(one.case.params)["batch"] == 1]
    done = stage.second_step(one.case, H200)
    assert one.support.level is Level.EMULATED and done.phases["cast"] and not done.products
    assert not done.phases["unattributed"]


@pytest.mark.parametrize(("mode", "phase"), [("bf16", ""), ("fp8", "cast"), ("served:weights=int4", "cast")])
def test_a_served_mixture_waits_once_a_layer(
    mode: str, phase: str, stage: Stage, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each expert's number of tokens; two products for each of the eight experts read."""
    waits: list[int] = []

    def first_eight(counts: Tensor) -> list[int]:
        waits.append(len(counts))
        return [1] * 8 + [0] * 56

    size = "olmoe-1b-7b"
    monkeypatch.setattr(experts, "copy_counts_to_host", first_eight)
    monkeypatch.setitem(sizes.SERVED_SIZES, size, replace(sizes.SERVED_SIZES[size], layers=BLOCKS))
    request = Request("decode", (mode,), axes=(("size", (size,)), ("batch", ("1",)), ("context", ("4096",))))
    (planned,) = [
        one for group in make_plan(request, (H200,), corpus.identity, compares=False) for one in group.cases if one.runs
    ]
    done = stage.second_step(planned.case, H200)
    assert waits == [64] * (2 * BLOCKS) and not done.phases["unattributed"]
    assert len(done.products) == (2 + 16 if mode == "fp8" else 0) and bool(done.phases["cast"]) == bool(phase)
    most = {"bf16": 101, "fp8": 155, "served:weights=int4": 263}[mode]
    assert done.launches <= most, (done.launches, done.operators)


@pytest.mark.parametrize("workload", [*AXES])
def test_a_replayed_step_needs_no_host(workload: str, stage: Stage, corpus: Corpus) -> None:
    mode = "bf16" if leaves(workload, "fp8") else "fp8"
    leaf, (planned, *_) = workloads.get(workload), cases_of(workload, mode, H200, corpus)
    state = leaf.prepare(stage.bench._make_case_setup(planned.case, H200))
    step = partial(leaf.step, state, SilentPhases())
    takes = "its step takes data from the host"
    assert explain_host_dependence(step).startswith(takes) == (bool(leaf.loads) or workload == "data")
    if leaf.loads:
        leaf.load(state)
    assert explain_host_dependence(step) == "" or workload == "data"
