"""The arms of a training, from a request and a device's facts alone, and which are trained beside each other."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from fp8bench.errors import UsageError
from fp8bench.features.train.arms import MOST_ARMS, Turns, arms_of_seed, check_training, device_of, make_arms, turns_of
from fp8bench.features.train.request import TrainerSettings, TrainingRequest
from fp8bench.features.train.values import ArmCost, ArmRole
from fp8bench.model import DeviceFacts, MemoryUse
from tests.counts import for_each
from tests.facts import CPU, H200
from tests.trainings import small, training

FP8 = ("bf16", "fp8", "fp8-delayed")


def names(**asked: Any) -> list[str]:
    """Those of the candidates on a processor."""
    arms = make_arms(TrainingRequest(**asked), CPU)
    return [arm.name for arm in arms if arm.role is ArmRole.CANDIDATE]


def test_reference_repeat_other_seed_and_candidates() -> None:
    """The highest precision leads, wherever it stands; one ulp is there in the first seed alone."""
    arms = make_arms(TrainingRequest(("nvfp4", "fp8", "bf16")), CPU)
    assert [(arm.name, arm.precision, arm.role) for arm in arms] == [
        ("bf16", "bf16", ArmRole.REFERENCE), ("bf16 again", "bf16", ArmRole.REPEAT),
        ("bf16 other seed", "bf16", ArmRole.OTHER_SEED), ("bf16 one ulp", "bf16", ArmRole.CHAOS),
        ("nvfp4", "nvfp4", ArmRole.CANDIDATE), ("fp8", "fp8", ArmRole.CANDIDATE),
    ]  # fmt: skip
    assert arms_of_seed(arms, 0) == arms and arms_of_seed(arms, 1) == (*arms[:3], *arms[4:])
    assert arms[3].taken(TrainerSettings()).nudge == "ulp"
    few = make_arms(TrainingRequest(("fp8", "bf16"), bands=("one-ulp",)), CPU)
    assert [arm.name for arm in few] == ["bf16", "bf16 one ulp", "fp8"]
    assert [arm.name for arm in make_arms(TrainingRequest(bands=("none",)), CPU)] == ["bf16", "fp8"]


def test_levels_of_ms_amp_are_arms_by_their_names() -> None:
    """By its table: weights, gradients and both moments of O1, O2 and O3. What they say is not swept beside them."""
    arms = make_arms(TrainingRequest(("bf16", "msamp-o1", "msamp-o2", "msamp-o3"), bands=("none",)), CPU)
    assert [arm.name for arm in arms] == ["bf16", "msamp-o1", "msamp-o2", "msamp-o3"]
    kept = [arm.taken(TrainerSettings()) for arm in arms]
    assert [(one.master, one.gradients, one.optimizer_states) for one in kept] == [
        ("fp32", "fp32", "fp32"), ("fp16-scaled", "fp8", "fp32"), ("fp16-scaled", "fp8", "fp8lm"),
        ("fp16-fp8", "fp8", "fp8lm"),
    ]  # fmt: skip
    assert {arm.precision for arm in arms[1:]} == {"fp8:scale=pow2"}
    swept = names(dtypes=("bf16", "msamp-o2"), sweep=(("rate", ("1e-3", "2e-3")),))
    assert swept == ["msamp-o2", "msamp-o2 rate=0.002"]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"dtypes": ("msamp-o2",)}, "msamp-o2 is one of MS-AMP's levels, which are held against a precision. Add bf16"),
        ({"dtypes": ("bf16", "msamp-o1"), "reference": "msamp-o1"}, "msamp-o1 is one of MS-AMP's levels"),
        ({"dtypes": ("bf16", "msamp-o1"), "sweep": (("gradients", ("fp32", "fp8")),)},
         "--sweep gradients: msamp-o1 says what it is. Leave one of them out."),
        ({"dtypes": ("bf16", "msamp-o4")}, "unknown dtype 'msamp-o4'"),
        ({"dtypes": ("bf16", "msamp-o1"), "ranks": 2, "settings": TrainerSettings(parallel="ddp", batch=2)},
         "--gradients fp8 does not go with --parallel ddp: what its ranks average are float32 gradients. Choose"),
        ({"dtypes": ("bf16", "fp8-unit"), "settings": TrainerSettings(arch="moe")},
         "constants for a GPT alone, none with --arch moe: choose fp8"),
        ({"dtypes": ("bf16", "fp8-unit"), "settings": TrainerSettings(attention="rounded")},
         "none with --attention rounded"),
        ({"dtypes": ("bf16", "fp8-unit"), "settings": TrainerSettings(precision_map=(("norm", "bf16"),))},
         "none with --precision-map of what is no product"),
    ],
)  # fmt: skip
def test_what_other_ways_cannot_be_is_a_sentence(asked: dict[str, Any], words: str) -> None:
    def check() -> None:
        request = TrainingRequest(**asked)
        check_training(request)
        make_arms(request, CPU)

    with pytest.raises(UsageError, match=re.escape(words)):
        check()


def test_a_swept_rate_is_swept_in_the_reference_too() -> None:
    """But for its own; where rates of one precision alone are compared they are compared with each other."""
    rates = (("rate", ("5e-4", "1e-3", "2e-3")),)
    arms = make_arms(TrainingRequest(("bf16", "fp8"), sweep=rates, bands=("none",)), CPU)
    assert [(arm.name, arm.role) for arm in arms] == [
        ("bf16", ArmRole.REFERENCE), ("bf16 rate=0.0005", ArmRole.OTHER_RATE), ("bf16 rate=0.002", ArmRole.OTHER_RATE),
        ("fp8 rate=0.0005", ArmRole.CANDIDATE), ("fp8", ArmRole.CANDIDATE), ("fp8 rate=0.002", ArmRole.CANDIDATE),
    ]  # fmt: skip
    alone = make_arms(TrainingRequest(("bf16",), sweep=rates, bands=("none",)), CPU)
    assert [arm.role for arm in alone] == [ArmRole.REFERENCE, ArmRole.CANDIDATE, ArmRole.CANDIDATE]


def test_a_reference_that_is_named_leads() -> None:
    """Also one that is not among the dtypes, or lower than they are."""
    assert make_arms(TrainingRequest(("bf16", "fp8"), "fp8"), CPU)[0].name == "fp8"
    arms = make_arms(TrainingRequest(("bf16", "fp8"), "fp32", bands=("repeat", "other-seed")), CPU)
    assert [arm.name for arm in arms if arm.role is not ArmRole.REPEAT] == ["fp32", "fp32 other seed", "bf16", "fp8"]


@for_each(("device", "native"), [(CPU, False), (H200, True)])
def test_native_is_what_the_device_multiplies_in(device: DeviceFacts, native: bool) -> None:
    """With a precision map all of its precisions have to be."""
    arms = {arm.name: arm for arm in make_arms(TrainingRequest(("bf16", "fp8", "nvfp4")), device)}
    assert arms["bf16"].native and arms["fp8"].native is native and not arms["nvfp4"].native
    mapped = TrainingRequest(("bf16", "fp8"), settings=TrainerSettings(precision_map=(("mlp", "nvfp4"),)))
    arms = {arm.name: arm for arm in make_arms(mapped, device)}
    assert arms["bf16"].native and not arms["fp8"].native


def test_an_option_is_swept_where_a_dtype_has_it() -> None:
    """What says nothing new is one arm, by its canonical name; several multiply."""
    sweep = (("history", ("1", "16", "1024")), ("margin", ("0", "1")))
    assert names(dtypes=FP8, sweep=sweep) == [
        "fp8", "fp8-delayed:history=1", "fp8-delayed:history=1:margin=1", "fp8-delayed:history=16",
        "fp8-delayed:history=16:margin=1", "fp8-delayed", "fp8-delayed:margin=1",
    ]  # fmt: skip
    assert names(dtypes=("bf16", "fp8"), sweep=(("formats", ("hybrid", "e4m3")),)) == ["fp8", "fp8:formats=e4m3"]


def test_accumulators_are_swept_by_their_bits() -> None:
    """Hopper's are a word, whichever way they are asked for."""
    modes = ["fp8", "fp8:accumulator=short", "fp8:accumulator=8"]
    assert names(dtypes=("bf16", "fp8"), sweep=(("accumulator", ("fp32", "14", "short", "8")),)) == modes
    for bits in ("1", "24", "8.0"):
        with pytest.raises(UsageError, match=f"accumulator cannot be '{bits}': .* number of bits from 2 to 23"):
            names(dtypes=("bf16", "fp8"), sweep=(("accumulator", (bits,)),))


def test_a_setting_is_swept_in_every_candidate() -> None:
    """Only what differs from the training's own is in the name; a reference that is alone is its own candidate."""
    sweep = (("loss-scale", ("auto", "1024")),)
    assert names(dtypes=("bf16", "fp8"), sweep=sweep) == ["fp8", "fp8 loss-scale=1024"]
    assert names(dtypes=("bf16",), sweep=sweep) == ["bf16 loss-scale=1024"]
    arm = make_arms(TrainingRequest(("bf16",), sweep=(("rate", ("0.01",)),)), CPU)[-1]
    assert arm.settings == (("rate", 0.01),) and arm.taken(TrainerSettings()).rate == 0.01


def test_micro_batches_are_swept_over_the_same_sequences() -> None:
    """A step of every arm reads as much text as the reference's."""
    swept = (("micro-batches", ("1", "2", "4")),)
    arms = make_arms(TrainingRequest(("bf16", "fp8"), settings=TrainerSettings(batch=8), sweep=swept), CPU)
    taken = {one.name: one.taken(TrainerSettings(batch=8)) for one in arms}
    assert {name: (one.micro_batches, one.batch) for name, one in taken.items() if name.startswith("fp8")} == {
        "fp8": (1, 8), "fp8 micro-batches=2 batch=4": (2, 4), "fp8 micro-batches=4 batch=2": (4, 2),
    }  # fmt: skip
    assert {one.batch * one.micro_batches for one in taken.values()} == {8}
    halves = TrainerSettings(micro_batches=2)
    assert names(dtypes=("bf16", "fp8"), settings=halves, sweep=swept) == [
        "fp8 micro-batches=1 batch=4", "fp8", "fp8 micro-batches=4 batch=1",
    ]  # fmt: skip


def test_what_a_device_refuses_is_an_arm_with_the_reason() -> None:
    """And no arm of any seed; a reference that is refused leaves nothing to train."""
    asked = TrainingRequest(("bf16", "fp8", "fp8:backend=te"))
    arm = make_arms(asked, CPU)[-1]
    assert arm.skip and arm not in arms_of_seed(make_arms(asked, CPU), 0)
    with pytest.raises(UsageError, match="the reference fp8:backend=te cannot be trained on cpu: "):
        make_arms(TrainingRequest(("bf16", "fp8"), "fp8:backend=te"), CPU)
    with pytest.raises(UsageError, match="nothing is left to compare with bf16 on cpu: fp8:backend=te: "):
        make_arms(TrainingRequest(("bf16", "fp8:backend=te")), CPU)


DDP = TrainerSettings(parallel="ddp")
TP = TrainerSettings(parallel="tp")
SP = replace(TP, parallel="sp")
REFUSED: dict[str, dict[str, Any]] = {
    "unknown dtype 'fb8'. Did you mean 'fp8'": {"dtypes": ("bf16", "fb8")},
    "unknown dtype 'bf61'. Did you mean 'bf16'": {"reference": "bf61"},
    "bf16 alone has nothing to be compared with": {"dtypes": ("bf16",)},
    "unknown setting or option to sweep 'histroy'. Did you mean 'history'": {
        "dtypes": FP8, "sweep": (("histroy", ("1",)),),
    },
    "--sweep rate: 'x' is no number": {"sweep": (("rate", ("x",)),)},
    "--sweep rate: rate must be a number above 0": {"sweep": (("rate", ("-1",)),)},
    "4 micro-batches do not divide the 2 sequences of a step": {"sweep": (("micro-batches", ("4",)),)},
    "history cannot be '0'": {"dtypes": FP8, "sweep": (("history", ("0",)),)},
    "unknown setting or option to sweep 'model'": {"sweep": (("model", ("nano",)),)},
    f"are more than the {MOST_ARMS}": {"sweep": (("rate", tuple(str(n / 100) for n in range(1, 80))),)},
    "unknown layer of model nano 'mpl'. Did you mean 'mlp'": {
        "settings": TrainerSettings(precision_map=(("mpl", "fp8"),)),
    },
    "--precision-map cannot mix tf32 into fp8": {"settings": TrainerSettings(precision_map=(("mlp", "tf32"),))},
    "unknown model 'nani'. Did you mean 'nano'": {"settings": TrainerSettings(model="nani")},
    "--arch cnn reads a text in lines of": {"settings": TrainerSettings(arch="cnn", sequence=33)},
    "--checkpointing blocks is for --arch gpt and moe": {
        "settings": TrainerSettings(arch="mlp"), "sweep": (("checkpointing", ("no", "blocks")),),
    },
    "--ranks 2 does not say how they train together. Add --parallel ddp or zero or fsdp or tp or sp": {"ranks": 2},
    "--parallel tp cannot cut nano for --ranks 3: ": {"ranks": 3, "settings": TP},
    "--arch mlp does not go with --parallel tp: heads": {"ranks": 2, "settings": replace(TP, arch="mlp")},
    "--arch moe does not go with --parallel tp: heads": {"ranks": 2, "settings": replace(TP, arch="moe")},
    "--gradients bf16 does not go with --parallel tp: ": {"ranks": 2, "settings": replace(TP, gradients="bf16")},
    "--compile yes does not go with --parallel tp: sums": {"ranks": 2, "settings": replace(TP, compile="yes")},
    "--compile yes does not go with --parallel zero: a compiled graph has weights that are taken away": {
        "ranks": 2, "settings": replace(DDP, parallel="zero", compile="yes", amax_group="own"),
    },
    "--wire is about several ranks, and there is one.": {"sweep": (("wire", ("bf16",)),)},
    "--wire has no effect: it is of --parallel zero or sp, and that is ddp": {
        "ranks": 2, "settings": replace(DDP, wire="fp8"),
    },
    "--sweep wire: wire must be one of fp32, bf16, fp8, got 'fp9'": {
        "ranks": 2, "settings": SP, "sweep": (("wire", ("fp9",)),),
    },
    "--dropout 0.1 does not go with --parallel sp: ranks have other tokens": {
        "ranks": 2, "settings": replace(SP, dropout=0.1),
    },
    "--parallel sp cannot cut nano for --ranks 2: 95 tokens have no equal share": {
        "ranks": 2, "settings": replace(SP, sequence=95),
    },
    "--precision-map does not go with --parallel sp: what stands around products": {
        "ranks": 2, "settings": replace(SP, precision_map=(("norm", "fp8"),)),
    },
    "--lora is for --arch gpt, by whole weights": {"ranks": 2, "settings": replace(SP, lora=2, weights_from="x")},
    "--parallel is about several ranks, and there is one. Add --ranks N": {"settings": DDP},
    "--amax-group is about several ranks, and there is one.": {"sweep": (("amax-group", ("own",)),)},
    "--no-isolation is of one process": {"ranks": 2, "settings": DDP, "isolation": False},
    "--max-batch is of one process": {"ranks": 2, "settings": DDP, "max_batch": True, "memory_limit": 1 << 30},
    "4 ranks cannot share a micro-batch of 2 equally. Give a --batch that is a multiple of 4": {
        "ranks": 4, "settings": DDP,
    },
    "2 ranks cannot share a micro-batch of 1 equally": {
        "ranks": 2, "settings": DDP, "sweep": (("micro-batches", ("2",)),),
    },
    "--arch cnn does not go with --ranks: its batch norm": {"ranks": 2, "settings": replace(DDP, arch="cnn")},
    "--arch moe does not go with --ranks: experts cast": {"ranks": 2, "settings": replace(DDP, arch="moe")},
    "--gradients fp8 does not go with --parallel ddp: what its ranks average": {
        "ranks": 2, "settings": replace(DDP, gradients="fp8"),
    },
    "--compile yes does not go with --ranks: the largest": {"ranks": 2, "settings": replace(DDP, compile="yes")},
    "--compile yes does not go with --parallel fsdp: a compiled graph has weights that are taken away": {
        "ranks": 2, "settings": replace(DDP, parallel="fsdp", compile="yes", amax_group="own"),
    },
}  # fmt: skip


def test_what_several_ranks_can_train() -> None:
    """Experts and compiled graphs by scales of their own; what cannot be all ranks' is never said to be."""
    own = replace(DDP, amax_group="own")
    for settings in (DDP, own, replace(own, arch="moe"), replace(own, compile="yes")):
        check_training(TrainingRequest(ranks=2, settings=settings))
    several = replace(CPU, ranks=2)
    for group, refused in (("", False), ("own", False), ("parallel", True)):
        request = TrainingRequest(("bf16", "fp8", "nvfp4"), ranks=2, settings=replace(DDP, amax_group=group))
        skips = {arm.name: arm.skip for arm in make_arms(request, several)}
        assert not skips["fp8"] and ("is always a rank's own" in skips["nvfp4"]) is refused
    swept = TrainingRequest(("fp8", "bf16"), ranks=2, settings=DDP, sweep=(("amax-group", ("own", "parallel")),))
    assert [arm.name for arm in make_arms(swept, several)][4:] == ["fp8 amax-group=own", "fp8 amax-group=parallel"]


@pytest.mark.parametrize("parallel", ["zero", "sp"])
def test_arms_may_differ_by_the_wire_alone(parallel: str) -> None:
    settings = replace(DDP, parallel=parallel, wire="bf16")
    swept = (("wire", ("bf16", "fp8")),)
    request = TrainingRequest(("bf16",), ranks=2, settings=settings, sweep=swept, bands=("none",))
    check_training(request)
    arms = make_arms(request, replace(CPU, ranks=2))
    assert [arm.name for arm in arms] == ["bf16", "bf16 wire=fp8"]
    assert [arm.taken(settings) for arm in arms] == [settings, replace(settings, wire="fp8")]


def test_blocks_are_cut_where_a_ranks_share_of_them_is_one() -> None:
    """Batches are whole: nothing of them need divide. Native products want sides of their own."""
    check_training(TrainingRequest(ranks=2, settings=replace(TP, batch=1)))
    request = TrainingRequest(("bf16", "fp16", "fp8"), ranks=2, settings=TP)
    for ranks, refused in ((2, False), (32, True)):
        skips = {arm.name: arm.skip for arm in make_arms(request, replace(H200, ranks=ranks))}
        assert ("takes sides in multiples of 16, and a rank has 6 and 24 features" in skips["fp8"]) is refused


@for_each("why", REFUSED)
def test_what_cannot_be_meant_is_refused_before_anything_starts(why: str) -> None:
    with pytest.raises(UsageError, match=re.escape(why)):
        check_training(TrainingRequest(**REFUSED[why]))


def test_the_device_is_the_first_gpu_or_the_one_that_is_named() -> None:
    assert device_of(TrainingRequest(), (CPU, H200)) == H200 and device_of(TrainingRequest(), (CPU,)) == CPU
    assert device_of(TrainingRequest(device="cpu"), (CPU, H200)) == CPU
    with pytest.raises(UsageError, match="unknown device on this machine 'cuda:3'"):
        device_of(TrainingRequest(device="cuda:3"), (CPU, H200))


# What each keeps between two steps, and needs at the highest point of one.
NEEDS = {"bf16": (40, 100), "fp8": (50, 120), "mxfp8": (60, 180)}


def turns(room: int, needs: Mapping[str, tuple[int, int]] = NEEDS, seeds: int = 2) -> Turns:
    request = small(dtypes=("bf16", "fp8", "mxfp8"), memory_limit=room, seeds=seeds)
    asked = replace(training(), request=request, arms=make_arms(request, CPU))
    costs = [ArmCost(arm, 0, kept=(("weights", kept),), memory=MemoryUse(peak)) for arm, (kept, peak) in needs.items()]
    return turns_of(asked, costs)


def told(found: Turns) -> list[tuple[int, str]]:
    return [(one.number, "+".join(arm.name for arm in one.arms)) for one in found.turns]


ALL = "bf16+bf16 again+bf16 other seed+fp8+mxfp8"


def test_all_are_together_where_they_fit() -> None:
    """What all keep, and the most that a step of one needs more: 230 and 120."""
    found = turns(350)
    assert told(found) == [(0, ALL), (1, ALL)] and (found.cut, found.out) == ("", {})
    assert told(turns(349))[0] == (0, "bf16+bf16 again")
    assert told(turns(1, {"bf16": (40, 100)}))[0] == (0, ALL), "nobody knows what the others need"


def test_else_each_is_beside_the_reference() -> None:
    """In every seed; the first of a seed has the reference's own lines. One that fits alone only is alone."""
    found = turns(219)
    pairs = ["bf16+bf16 again", "bf16+bf16 other seed", "bf16+fp8", "mxfp8"]
    assert told(found) == [*((0, one) for one in pairs), *((1, one) for one in pairs)]
    assert [one.first for one in found.turns] == [True, False, False, False] * 2
    assert "all arms need 350 B together, and there are 219 B" in found.cut and not found.out


def test_one_that_fits_nowhere_is_out_and_the_reference_is_needed() -> None:
    found = turns(179)
    assert found.out == {"mxfp8": "it needs 180 B alone, and there are 179 B"}
    assert told(found) == [(0, "bf16+bf16 again"), (0, "bf16+bf16 other seed"), (0, "bf16+fp8"),
                            (1, "bf16+bf16 again"), (1, "bf16+bf16 other seed"), (1, "bf16+fp8")]  # fmt: skip
    with pytest.raises(UsageError, match=r"the reference bf16 needs 100 B .*, and there are 99 B. Choose a smaller"):
        turns(99)
