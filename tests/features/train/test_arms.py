"""Allowed requests of a training, its arms by request and device, and which arms train together."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from typing import Any

import pytest

from fp8bench.errors import UsageError
from fp8bench.features.train.arms import (
    MAX_ARMS,
    check_training,
    check_training_memory,
    choose_device,
    make_arms,
    select_arms_of_seed,
)
from fp8bench.features.train.request import SETTINGS_RULES, TRAINING_RULES, TrainerSettings, TrainingRequest
from fp8bench.features.train.values import Arm, ArmCost, ArmRole
from fp8bench.model import DeviceFacts, MemoryUse
from tests.counts import for_each
from tests.facts import CPU, H200
from tests.trainings import small, training

BOTH = ("bf16", "fp8")
DELAYED = (*BOTH, "fp8-delayed")
MSAMP = ("msamp-o1", "msamp-o2", "msamp-o3")
NONE = {"bands": ("none",)}
RATES = (("rate", ("5e-4", "1e-3", "2e-3")),)
MICRO = (("micro-batches", ("1", "2", "4")),)
DDP = TrainerSettings(parallel="ddp")
TP = TrainerSettings(parallel="tp")
SP = replace(TP, parallel="sp")


@for_each(
    ("asked", "names"),
    [
        # The highest precision leads, or the named one; bands are those requested.
        ({"dtypes": ("nvfp4", "fp8", "bf16")}, ["bf16", "bf16 again", "bf16 one ulp", "nvfp4", "fp8"]),
        ({"dtypes": ("fp8", "bf16"), "bands": ("one-ulp",)}, ["bf16", "bf16 one ulp", "fp8"]),
        ({"reference": "fp8", **NONE}, ["fp8", "bf16"]),
        ({"dtypes": ("bf16", *MSAMP), **NONE}, ["bf16", *MSAMP]),
        ({"dtypes": ("bf16", "msamp-o2"), "sweep": (("rate", ("1e-3",)),), **NONE}, ["bf16", "msamp-o2"]),
        # A rate is swept in the reference too; rates of one precision are compared with each other.
        (
            {"sweep": RATES, **NONE},
            ["bf16", "bf16 rate=0.0005", "bf16 rate=0.002", "fp8 rate=0.0005", "fp8", "fp8 rate=0.002"],
        ),
        ({"dtypes": ("bf16",), "sweep": RATES, **NONE}, ["bf16", "bf16 rate=0.0005", "bf16 rate=0.002"]),
        # An option is swept in dtypes that have it; equal arms are merged under the canonical name; several options
        # multiply.
        (
            {"dtypes": DELAYED, "sweep": (("history", ("1", "16", "1024")), ("margin", ("0", "1"))), **NONE},
            [
                "bf16",
                "fp8",
                "fp8-delayed:history=1",
                "fp8-delayed:history=1:margin=1",
                "fp8-delayed:history=16",
                "fp8-delayed:history=16:margin=1",
                "fp8-delayed",
                "fp8-delayed:margin=1",
            ],
        ),
        (
            {"sweep": (("accumulator", ("fp32", "14", "short", "8")),), **NONE},
            ["bf16", "fp8", "fp8:accumulator=short", "fp8:accumulator=8"],
        ),
        # A setting is swept in every candidate; a lone reference is its own candidate.
        ({"sweep": (("loss-scale", ("auto", "1024")),), **NONE}, ["bf16", "fp8", "fp8 loss-scale=1024"]),
        (
            {"sweep": (("clip", ("1", "0.5", "0.5/block")),), **NONE},
            ["bf16", "fp8", "fp8 clip=0.5", "fp8 clip=0.5/block"],
        ),
        (
            {"settings": TrainerSettings(micro_batches=2), "sweep": MICRO, **NONE},
            ["bf16", "fp8 micro-batches=1 batch=4", "fp8", "fp8 micro-batches=4 batch=1"],
        ),
    ],
)
def test_which_arms_a_request_has(asked: dict[str, Any], names: list[str]) -> None:
    arms = make_arms(TrainingRequest(**asked), CPU)
    assert [arm.name for arm in arms] == names
    roles = {"bf16 again": ArmRole.REPEAT, "bf16 one ulp": ArmRole.CHAOS}
    for arm in arms[1:]:
        other_rate = arm.precision == "bf16" and "rate" in arm.name and len(asked.get("dtypes", BOTH)) > 1
        assert arm.role is roles.get(arm.name, ArmRole.OTHER_RATE if other_rate else ArmRole.CANDIDATE)
    once = {arm.name for arm in arms} - {arm.name for arm in select_arms_of_seed(arms, 1)}
    assert arms[0].role is ArmRole.REFERENCE and once == {"bf16 one ulp"} & set(names)


def test_what_arms_take_of_the_settings() -> None:
    """Every arm's step reads as much text as the reference's, for any micro-batches."""
    levels = make_arms(TrainingRequest(("bf16", *MSAMP), **NONE), CPU)
    taken = [arm.merge_settings(TrainerSettings()) for arm in levels]
    assert [(own.master, own.gradients, own.optimizer_states) for own in taken] == [
        ("fp32", "fp32", "fp32"),
        ("fp16-scaled", "fp8", "fp32"),
        ("fp16-scaled", "fp8", "fp8lm"),
        ("fp16-fp8", "fp8", "fp8lm"),
    ]
    assert {arm.precision for arm in levels[1:]} == {"fp8:scale=pow2"}
    assert make_arms(TrainingRequest(sweep=RATES), CPU)[-1].merge_settings(TrainerSettings()).rate == 2e-3
    arms = make_arms(TrainingRequest(settings=TrainerSettings(batch=8), sweep=MICRO), CPU)
    sizes = [arm.merge_settings(TrainerSettings(batch=8)) for arm in arms]
    assert [(own.micro_batches, own.batch) for own in sizes][-3:] == [(1, 8), (2, 4), (4, 2)]
    assert {own.batch * own.micro_batches for own in sizes} == {8}


@for_each(("device", "native"), [(CPU, False), (H200, True)])
def test_native_is_what_the_device_multiplies_in(device: DeviceFacts, native: bool) -> None:
    """All precisions of a map must be native."""
    arms = {arm.name: arm for arm in make_arms(TrainingRequest(("bf16", "fp8", "nvfp4")), device)}
    assert arms["bf16"].native and arms["fp8"].native is native and not arms["nvfp4"].native
    mapped = TrainingRequest(settings=TrainerSettings(precision_map=(("mlp", "nvfp4"),)))
    arms = {arm.name: arm for arm in make_arms(mapped, device)}
    assert arms["bf16"].native and not arms["fp8"].native


def test_what_a_device_refuses_is_an_arm_with_the_reason() -> None:
    arms = make_arms(TrainingRequest((*BOTH, "fp8:backend=te")), CPU)
    assert arms[-1].skip and arms[-1] not in select_arms_of_seed(arms, 0)
    with pytest.raises(UsageError, match="the reference fp8:backend=te cannot be trained on cpu: "):
        make_arms(TrainingRequest(BOTH, "fp8:backend=te"), CPU)
    with pytest.raises(UsageError, match="nothing is left to compare with bf16 on cpu: fp8:backend=te: "):
        make_arms(TrainingRequest(("bf16", "fp8:backend=te")), CPU)
    for own in ({"arch": "moe"}, {"attention": "rounded"}, {"precision_map": (("norm", "bf16"),)}):
        with pytest.raises(UsageError, match=f"nothing is left .* without --{min(own).replace('_', '-')}"):
            make_arms(TrainingRequest(("bf16", "fp8-unit"), settings=TrainerSettings(**own)), CPU)


def test_a_single_precision_of_an_own_model_is_compared_with_the_model_unchanged() -> None:
    request = TrainingRequest(("fp8",), settings=TrainerSettings(make="net.py:make"))
    arms = make_arms(request, CPU)
    assert arms[0].name == "untouched" and arms[0].role is ArmRole.REFERENCE and arms[-1].name == "fp8"
    with pytest.raises(UsageError, match="untouched has nothing to compare with"):
        make_arms(replace(request, dtypes=("untouched",)), CPU)
    with pytest.raises(UsageError, match=r"Give it: `fp8bench train net\.py:make"):
        make_arms(TrainingRequest(("untouched", "fp8")), CPU)


def ranks(settings: TrainerSettings, count: int = 2, **changes: Any) -> dict[str, Any]:
    return {"ranks": count, "settings": replace(settings, **changes)}


REFUSED: dict[str, dict[str, Any]] = {
    "unknown precision 'fb8'. Did you mean 'fp8'": {"dtypes": ("bf16", "fb8")},
    "bf16 has nothing to compare with": {"dtypes": ("bf16",)},
    "msamp-o2 is one of MS-AMP's levels": {"dtypes": ("msamp-o2",)},
    "msamp-o1 is one of MS-AMP's levels": {"dtypes": ("bf16", "msamp-o1"), "reference": "msamp-o1"},
    "--sweep gradients: msamp-o1 sets it": {
        "dtypes": ("bf16", "msamp-o1"), "sweep": (("gradients", ("fp32", "fp8")),),
    },
    "--gradients fp8 does not go with --parallel ddp": {"dtypes": ("bf16", "msamp-o1"), **ranks(DDP, batch=2)},
    "unknown setting or option to sweep 'histroy'. Did you mean 'history'": {
        "dtypes": DELAYED, "sweep": (("histroy", ("1",)),),
    },
    "--then bf16@80%: bf16 is in bf16 from its beginning": {
        "dtypes": ("bf16", "fp32"), "settings": TrainerSettings(then="bf16@80%"),
    },
    "unit-scaled from its beginning": {"dtypes": ("bf16", "fp8-unit"), "settings": TrainerSettings(then="bf16@80%")},
    "cannot be renewed in a compiled graph": {"settings": TrainerSettings(refresh_scales=5, compile="yes")},
    "--then work in one process": {
        "settings": TrainerSettings(then="bf16@80%", parallel="ddp", batch=2), "ranks": 2,
    },
    "--sweep rate: 'x' is not a number": {"sweep": (("rate", ("x",)),)},
    "--sweep rate: rate must be a number above 0": {"sweep": (("rate", ("-1",)),)},
    "4 micro-batches do not divide the 2 sequences of a step": {"sweep": (("micro-batches", ("4",)),)},
    "history cannot be '0'": {"dtypes": DELAYED, "sweep": (("history", ("0",)),)},
    **{f"accumulator cannot be '{bits}'": {"sweep": (("accumulator", (bits,)),)} for bits in ("1", "24", "8.0")},
    f"are more than the {MAX_ARMS}": {"sweep": (("rate", tuple(str(n / 100) for n in range(1, 80))),)},
    "unknown layer of model nano 'mpl'. Did you mean 'mlp'": {
        "settings": TrainerSettings(precision_map=(("mpl", "fp8"),)),
    },
    "--precision-map cannot mix tf32 into fp8": {"settings": TrainerSettings(precision_map=(("mlp", "tf32"),))},
    "--checkpointing blocks is for": {
        "settings": TrainerSettings(arch="mlp"), "sweep": (("checkpointing", ("no", "blocks")),),
    },
    "--ranks 2 needs a way": {"ranks": 2},
    "--parallel only works with several ranks": {"settings": DDP},
    "--wire only works with several ranks": {"sweep": (("wire", ("bf16",)),)},
    "--no-isolation is for one process": {**ranks(DDP), "isolation": False},
    "4 ranks cannot share a micro-batch of 2": ranks(DDP, 4),
    "2 ranks cannot share a micro-batch of 1": {**ranks(DDP), "sweep": (("micro-batches", ("2",)),)},
    "--arch cnn does not go with --ranks": ranks(DDP, arch="cnn"),
    "--arch moe does not go with --ranks": ranks(DDP, arch="moe"),
    "--compile yes does not go with --ranks": ranks(DDP, compile="yes"),
    "--wire has no effect": ranks(DDP, wire="fp8"),
    "--parallel tp cannot cut nano for --ranks 3": ranks(TP, 3),
    "--arch mlp does not go with --parallel tp": ranks(TP, arch="mlp"),
    "--gradients bf16 does not go with --parallel tp": ranks(TP, gradients="bf16"),
    "--sweep wire: wire must be one of": {**ranks(SP), "sweep": (("wire", ("fp9",)),)},
    "--dropout 0.1 does not go with --parallel sp": ranks(SP, dropout=0.1),
    "--parallel sp cannot cut nano for --ranks 2: 95 tokens": ranks(SP, sequence=95),
    "--precision-map does not go with --parallel sp": ranks(SP, precision_map=(("norm", "fp8"),)),
}  # fmt: skip


@for_each("why", REFUSED)
def test_impossible_requests_are_refused_before_anything_starts(why: str) -> None:
    with pytest.raises(UsageError, match=re.escape(why)):
        check_training(TrainingRequest(**REFUSED[why]))


def test_what_several_ranks_can_train() -> None:
    """Split blocks need native products of a rank's shard."""
    for settings in (DDP, replace(TP, batch=1), replace(TP, precision_map=(("norm", "fp8"),))):
        check_training(TrainingRequest(ranks=2, settings=settings))
    for count, refused in ((2, False), (32, True)):
        arms = make_arms(TrainingRequest(("bf16", "fp16", "fp8"), **ranks(TP)), replace(H200, ranks=count))
        assert ("needs sides in multiples of 16" in arms[-1].skip) is refused


def test_arms_may_differ_by_what_ranks_send() -> None:
    wires = ("bf16", "fp8")
    for settings in (replace(DDP, parallel="zero"), SP):
        request = TrainingRequest(("bf16",), ranks=2, settings=settings, sweep=(("wire", wires),), **NONE)
        check_training(request)
        arms = make_arms(request, replace(CPU, ranks=2))[1:]
        assert [arm.merge_settings(settings) for arm in arms] == [replace(settings, wire=wire) for wire in wires]


def test_the_device_is_the_first_gpu_or_the_one_that_is_named() -> None:
    assert choose_device(TrainingRequest(), (CPU, H200)) == H200 and choose_device(TrainingRequest(), (CPU,)) == CPU
    assert choose_device(TrainingRequest(device="cpu"), (CPU, H200)) == CPU
    with pytest.raises(UsageError, match="unknown device on this machine 'cuda:3'"):
        choose_device(TrainingRequest(device="cuda:3"), (CPU, H200))


def test_arms_that_do_not_fit_into_memory_together_are_refused() -> None:
    """All arms' storage plus the largest need of one step: 190 and 120. Not checked if one arm's needs are unknown."""
    request = small(dtypes=("bf16", "fp8", "mxfp8"))
    needs = {"bf16": (40, 100), "fp8": (50, 120), "mxfp8": (60, 180)}
    costs = [ArmCost(arm, 0, kept=(("weights", kept),), memory=MemoryUse(peak)) for arm, (kept, peak) in needs.items()]
    arms = make_arms(request, CPU)
    tight, wide = (
        replace(training(), request=request, arms=arms, device=replace(CPU, memory_bytes=room)) for room in (343, 345)
    )
    check_training_memory(wide, costs)
    check_training_memory(tight, costs[:2])
    with pytest.raises(UsageError, match="the 4 arms need 310 B together, and there are 308 B"):
        check_training_memory(tight, costs)


SETTINGS: dict[str, list[Any]] = {
    "model": ["", 3], "arch": ["rnn"], "batch": [-1, 1.5, True], "sequence": [-1], "micro_batches": [0],
    "rate": [0, float("nan"), 11], "rates": [(("norm", -1.0),), (("", 1.0),), "norm=1"],
    "dropout": [1.0, -0.1], "clip": [-1, float("inf"), True, "1/", "1/layer", "much/kind"],
    "loss_scale": ["0.5", "8589934592", "big", 1024.0], "optimizer_states": ["fp8"], "master": ["bf16"],
    "gradients": ["fp16"], "checkpointing": ["yes"], "compile": ["maybe"], "attention": ["low"],
    "on_nan": ["ignore"], "start": [3],
    "tasks": ["copy"], "metric": ["pkg:f", ("",)], "precision_map": [(("mlp",),), "mlp=fp8"],
    "parallel": ["pp"], "wire": ["int8"], "make": [3], "skip": ["head"],
    "optimizer": ["rmsprop", "adamw:betas=0.9,1"],
    "schedule": ["cyclic", "cosine:warmup=1.1", "linear:floor=2", "constant:floor=0"], "updates": ["fp4"],
    "scales": ["last", (("fp8", "up", "input"),)], "refresh_scales": [0, 1.5], "saturation_bound": [-1, 100, "1"],
    "then": [3, "bf16", "bf16@80", "@80%", "bf16@0%", "bf16@100%", "bf16@x%"],
}  # fmt: skip
ASKED: dict[str, list[Any]] = {
    "dtypes": [(), "fp8", (8,)], "reference": [8], "steps": [0, 1.5, True], "seeds": [0], "seed": [-1],
    "margin": [0, 1, -0.01, float("nan")], "sweep": [(("history", ()),)], "device": [""], "threads": [0], "data": [""],
    "stride": [0], "evaluate": [0], "keep": [0],
    "imports": ["x"], "isolation": [None],
    "energy": ["yes"],
    "bands": ["one-ulp", ("chaos",)], "ranks": [0, 1, 2, True],
    "scales_from": [""], "own_batch": [0, "1GiB"],
}  # fmt: skip


@for_each(("name", "value"), [(name, value) for name, values in SETTINGS.items() for value in values])
def test_invalid_settings_are_refused(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"^{name} must be .*, got "):
        TrainerSettings(**{name: value})


@for_each(("name", "value"), [(name, value) for name, values in ASKED.items() for value in values])
def test_invalid_requests_are_refused(name: str, value: Any) -> None:
    with pytest.raises(UsageError):
        TrainingRequest(**{name: value})


def test_every_field_has_a_rule() -> None:
    assert set(SETTINGS_RULES) == {field.name for field in fields(TrainerSettings)} == set(SETTINGS)
    assert (
        set(TRAINING_RULES) | {"settings"} == {field.name for field in fields(TrainingRequest)} == {*ASKED, "settings"}
    )
    for scale in ("auto", "dynamic", "1", "65536", "4294967296"):  # from 2^0 to 2^32
        assert SETTINGS_RULES["loss_scale"].holds(scale)


def test_an_arm_takes_its_own_settings_and_only_candidates_the_map() -> None:
    settings = TrainerSettings(precision_map=(("mlp", "fp8"),), rate=0.01)
    arm = Arm("fp8 rate=0.02", "fp8", settings=(("rate", 0.02),))
    assert arm.merge_settings(settings) == replace(settings, rate=0.02)
    for role in (ArmRole.REFERENCE, ArmRole.REPEAT):
        assert replace(arm, role=role).merge_settings(settings) == replace(settings, rate=0.02, precision_map=())
