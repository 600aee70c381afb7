"""The checklist's rules on runs whose answers are known; then advice: planted truths, and what no advice may do."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8bench.analysis.findings import findings
from fp8bench.features.advise.basis import Basis, gain_text
from fp8bench.features.advise.decide import advised, harm_of, predicted
from fp8bench.features.advise.job import costs_of
from fp8bench.features.advise.rules import bound_of
from fp8bench.features.advise.shape_rules import pays_from
from fp8bench.features.advise.values import Advice, AdviceKind, Advised, Cost, Met
from fp8bench.features.advise.view import advice_elements, checklist, speed
from fp8bench.features.sensitivity.study import By, LayerTrial, Study
from fp8bench.features.train.values import KeptTraining, StreamLine, Training
from fp8bench.features.train.verdicts.summary import JudgedTraining
from fp8bench.model import (
    Finding,
    Interval,
    Label,
    Level,
    MemoryUse,
    OperatorCount,
    Phase,
    PhaseCount,
    Record,
    Run,
    Share,
    ShareKind,
    Shares,
    Status,
    Tape,
    Verdict,
)
from fp8bench.model.step import Coverage, HeldProduct, Holder
from fp8bench.report.elements import Items
from tests.advised import BF16, FP8, NANO, advise, answer, basis, group, only, record, run
from tests.counts import for_each
from tests.energies import use
from tests.learning_curves import curve, held_out, lines, rows, training


def met(rule: str, *groups: list[Record], mode: str = "fp8", **more: object) -> Met:
    return answer(advise(*groups, **more), rule, mode).met


HALF = Interval(0.5, 0.4, 0.625, 0.99)
TINY, WHOLE = {"gemm": 500, "optimizer_step": 9500}, {"unattributed": 8000}
STAGES = [group({"pass": word}, fp8=phases) for word, phases in (("training", FP8), ("forward", {**FP8, "cast": 4000}))]


@for_each(
    ("rule", "records", "wanted"),
    [
        ("amdahl", group(fp8=FP8), Met.YES),
        # Of an emulation nobody knows how fast products are, and 5% of a step are too few in any case.
        ("amdahl", group(bf16=TINY, level=Level.EMULATED, fp8=TINY), Met.NO),
        ("amdahl", group(level=Level.EMULATED, fp8=FP8), Met.UNKNOWN),
        # A compiled step has no phase of casts.
        ("amdahl", group(bf16=WHOLE, fp8=WHOLE), Met.UNKNOWN),
        ("casts", group(bf16=WHOLE, fp8=WHOLE), Met.UNKNOWN),
        ("memory", group(fp8=FP8), Met.UNKNOWN),
        ("batch", group({**NANO, "batch": 1}, fp8=FP8), Met.UNKNOWN),
        *(("casts", group(fp8={**BF16, "gemm": gemm, "cast": cast}), wanted) for gemm, cast, wanted in (
            (3000, 600, Met.YES), (3000, 4000, Met.NO), (6000, 600, Met.NO), (6500, 1, Met.NO))),
    ],
)  # fmt: skip
def test_one_group_by_one_rule(rule: str, records: list[Record], wanted: Met) -> None:
    assert met(rule, records) is wanted


def test_a_share_of_ten_percent_is_not_worth_it() -> None:
    """Products twice as fast give 5% there, and 43% where they are 60% of the step."""
    small = {"gemm": 1000, "optimizer_step": 5000, "elementwise": 4000}
    found = answer(advise(group(bf16=small, fp8={**small, "cast": 50, "gemm": 500})), "amdahl")
    assert found.met is Met.NO and found.figure == "10% of the step: 1.05x with products 2.00x as fast, as here"


def test_stages_gain_or_not() -> None:
    found = answer(advise(*STAGES), "stages")
    assert found.met is Met.NO and "training 1.3" in found.figure and "forward 0.9" in found.figure


def test_a_model_as_it_came_has_shares_in_place_of_phases() -> None:
    """Products are 60% of 10 ms there, and 40% of 7.5 ms with casts of 10%: an estimate, which bounds nothing."""
    looked = [Shares(tuple(Share(kind, "", False, seconds, 1) for kind, seconds in parts), 1.0) for parts in (
        ((ShareKind.GEMM, 0.6),), ((ShareKind.GEMM, 0.4), (ShareKind.CAST, 0.1)))]  # fmt: skip
    lead, case = group(bf16={"unattributed": 10_000}, fp8={"unattributed": 7500})
    records = [replace(lead, shares=looked[0]), replace(case, shares=looked[1])]
    found = advise(records)
    amdahl, casts = answer(found, "amdahl"), answer(found, "casts")
    assert (amdahl.met, amdahl.figure) == (
        Met.YES, "60% of the step: 1.43x with products 2.00x as fast, as here, estimated from shares of the step"
    )  # fmt: skip
    assert casts.met is Met.YES and casts.figure.startswith("products 2.00x, with casts 1.60x, estimated")
    unlooked = advise([lead, case])
    assert "--shares tells them" in answer(unlooked, "amdahl").figure and answer(unlooked, "casts").met is Met.UNKNOWN
    (pair,) = basis(records).cases
    assert predicted(pair) == predicted(basis([lead, case]).cases[0])


def test_the_cheapest_scaling_of_its_width() -> None:
    """Compared with what was timed beside it; four bits are no rival of eight."""
    found = advise(group(fp8=FP8, fp8_rowwise={**FP8, "cast": 1500}, nvfp4={**FP8, "gemm": 2000}))
    assert answer(found, "granularity").met is Met.YES
    slower = answer(found, "granularity", "fp8-rowwise")
    assert slower.met is Met.NO and "of fp8's speed" in slower.figure
    assert answer(found, "granularity", "nvfp4").met is Met.UNKNOWN


def test_compiling_is_looked_at_where_it_is_an_axis() -> None:
    eager, compiled = ({**NANO, "compile": word} for word in ("no", "yes"))
    slow = group(eager, fp8={**FP8, "cast": 5000})
    fast = group(compiled, bf16={"unattributed": 9000}, fp8={"unattributed": 7000})
    found = answer(advise(slow, fast), "compile")
    assert found.met is Met.YES and found.figure.startswith("compiled 1.29x") and "without 0.83" in found.figure
    assert met("compile", slow) is Met.UNKNOWN


def test_a_larger_batch_may_gain_more() -> None:
    found = advise(group({**NANO, "batch": 1}, fp8={**FP8, "cast": 2500}), group({**NANO, "batch": 8}, fp8=FP8))
    assert [each.met for each in found.answers if each.rule == "batch"] == [Met.NO, Met.YES]


def squares(*speeds: float, mode: str = "nvfp4") -> list[list[Record]]:
    """Products of 512, 1024, 2048, ..., so many times as fast as in bf16."""
    return [
        group({"m": 512 << n, "n": 512 << n, "k": 512 << n}, workload="gemm", bf16={"gemm": 8000},
              **{mode: {"gemm": round(8000 / speed)}})
        for n, speed in enumerate(speeds)
    ]  # fmt: skip


def test_break_even_is_that_of_this_run() -> None:
    """nvfp4 pays from between 1024 and 2048 on; where it pays nowhere that is said."""
    begins, largest, grounds = pays_from("nvfp4", "cuda:0", basis(*squares(0.5, 0.8, 1.4, 1.9)))
    assert isinstance(begins, float) and 1024 < begins < 2048 and largest == 4096 and len(grounds) == 5
    assert pays_from("nvfp4", "cuda:0", basis(*squares(0.5, 0.8, 0.9)))[0] == float("inf")
    few = pays_from("nvfp4", "cuda:0", basis(*squares(0.5, 0.8)))
    assert isinstance(few, str) and few.startswith("2 sizes")


def model(side: int) -> list[Record]:
    """A step in bf16 and nvfp4 whose tape has products of that size."""
    flops = 2 * side**3
    outputs = (f"bf16[{side},{side}]",)
    tape = Tape((OperatorCount("gemm", "mm", outputs=outputs, calls=3, flops=flops, path="bf16"),),
                (PhaseCount("gemm", 3 * flops, 1, 3, by_path=(("bf16", 3 * flops),)),))  # fmt: skip
    lead, case = group(nvfp4=FP8)
    return [replace(lead, tape=tape), replace(case, tape=replace(tape, phases=(PhaseCount("gemm", 3 * flops, 2, 3),)))]


def with_run(*groups: list[Record]) -> tuple[tuple[Run, Mapping[str, Finding]], ...]:
    """Another run of this machine, whose figures answer questions about the first one."""
    other = run(*groups)
    return ((other, findings(other)),)


@for_each(("side", "wanted"), [(512, Met.NO), (2048, Met.YES), (16384, Met.UNKNOWN)])
def test_products_of_a_step_against_break_even(side: int, wanted: Met) -> None:
    assert met("shapes", model(side), *squares(0.5, 0.8, 1.4, 1.9), mode="nvfp4") is wanted
    found = advise(model(side), other_runs=with_run(*squares(0.5, 0.8, 1.4, 1.9)))
    assert answer(found, "shapes", "nvfp4").met is wanted
    assert {each.setting for each in found.answers} == {model(side)[0].case.setting}
    alone = answer(advise(model(side)), "shapes", "nvfp4")
    assert alone.met is Met.UNKNOWN and alone.measure.startswith("fp8bench suite gemm --dtypes bf16,nvfp4, then")


def test_what_would_measure_a_profile_is_a_profile() -> None:
    """Forward and training have other optimizers, and are the same model all the same."""
    make = {"make": "my_pkg:make", "pass": "training", "optimizer": "adamw", "compile": "no"}
    forward = {**make, "pass": "forward", "optimizer": "none"}
    training = group(make, workload="model", fp8=FP8)
    measures = {each.rule: each.measure for each in advise(training).answers if each.met is Met.UNKNOWN}
    assert measures["compile"] == "fp8bench profile my_pkg:make --dtypes fp8 --compile"
    assert measures["layers"] == "fp8bench sensitivity my_pkg:make --dtype fp8"
    assert measures["learns"] == "fp8bench train my_pkg:make --dtypes bf16,fp8 --seeds 5" and "stages" in measures
    assert (
        met("stages", training, other_runs=with_run(group(forward, workload="model", fp8={**FP8, "cast": 4000})))
        is Met.NO
    )
    alone = answer(advise(group(forward, workload="model", fp8=FP8)), "compile").measure
    assert alone == "fp8bench profile my_pkg:make --forward --dtypes fp8 --compile"


def holder(name: str, kind: str, flops: int, converted: bool = True, side: int = 4096) -> Holder:
    products = (HeldProduct(side, side, side),)
    return Holder(name, kind, (8, 8), products, flops, 1, converted, "" if converted else "no product of ours for it")


def test_coverage_and_experts() -> None:
    """A mixture of experts of which only linear layers are converted."""
    coverage = Coverage((holder("attn", "linear", 18), holder("mlp", "experts", 73, False), holder("head", "head", 9)),
                        flops=100)  # fmt: skip
    found = advise([record("bf16", BF16, reference=True), record("fp8", FP8, coverage=coverage)])
    covered, experts = answer(found, "coverage"), answer(found, "experts")
    assert covered.met is Met.NO and "mlp is not: no product" in covered.figure
    assert experts.met is Met.NO and experts.figure == "experts are 73% of product FLOPs, 0% of them converted"
    assert not {"coverage", "experts", "compile"} & {each.rule for each in advise(group(fp8=FP8)).answers}


def test_training_in_fp8_saves_no_memory_and_the_copies_are_named() -> None:
    before = MemoryUse(1000 << 20, (("weights", 400 << 20), ("optimizer", 600 << 20)))
    after = MemoryUse(1010 << 20, (*before.roles, ("low_precision_weights", 10 << 20)))
    lead = record("bf16", BF16, reference=True, memory=before)
    found = answer(advise([lead, record("fp8", FP8, memory=after)]), "memory")
    assert found.met is Met.NO and found.figure == (
        "1.010x of bf16's peak; what stays: weights (400 MiB), optimizer state (600 MiB); what comes on top: "
        "low-precision copies of weights (10.0 MiB)"
    )
    assert met("memory", [lead, record("fp8", FP8, memory=MemoryUse(500 << 20))]) is Met.YES
    assert met("memory", [lead, record("fp8", FP8, memory=after, level=Level.EMULATED)]) is Met.UNKNOWN


def study(*gaps: float) -> Study:
    """Losses of candidates, so much above the reference's of 2.0: all layers low, then with the head left high."""
    maps = ((), (("head", "bf16"),), (("head", "bf16"), ("blocks.0", "bf16")))
    low = (("blocks.0.mlp", "head"), ("blocks.0.mlp",), ())
    made = [LayerTrial(f"c{n}", "", "fp8", maps[n], low[n], losses=(2 * (1 + gap),)) for n, gap in enumerate(gaps)]
    probes = (LayerTrial("head", "head", "bf16", low=("head",), losses=(2.2,)),
              LayerTrial("blocks.0.mlp", "mlp", "bf16", low=("blocks.0.mlp",), losses=(2.0,)))  # fmt: skip
    return Study(
        "transformer", (("size", "gpt2-124m"),), "cuda:0", "fp8", "bf16", "native", By.LAYER, 50, 0.01, 0,
        LayerTrial("reference", "", "bf16", losses=(2.0,)),
        (LayerTrial("draw 1", "", "bf16", draw=1, losses=(2.004,)),), probes, tuple(made), started="2026-01-05",
        path="study.json",
    )  # fmt: skip


@for_each(("gaps", "wanted"), [((0.005,), Met.YES), ((0.1, 0.005), Met.NO), ((), Met.UNKNOWN)])
def test_layers_by_a_study(gaps: tuple[float, ...], wanted: Met) -> None:
    assert met("layers", group(fp8=FP8), studies=(study(*gaps),)) is wanted
    if len(gaps) > 1:  # with the map that the study found, the case bears it
        mapped = group(fp8=FP8)
        mapped[1] = replace(mapped[1], case=replace(mapped[1].case, precision_map=(("head", "bf16"),)))
        bears = next(each for each in advise(mapped, studies=(study(*gaps),)).answers if each.rule == "layers")
        assert bears.met is Met.YES and bears.figure.startswith("layers low: 1, loss +0.5%")
    unit = advise(group(fp8_unit=FP8), studies=(study(*gaps),)).answers
    assert unit and not [each for each in unit if each.rule == "layers"], "no layer of it can stand in another model"
    other = replace(study(*gaps), params=(("size", "nano"),))
    assert met("layers", group(fp8=FP8), studies=(other,)) is Met.UNKNOWN


ADOPT, ROUTE, SCHEDULE, NOTHING = AdviceKind


def test_a_step_that_gains_is_adopted() -> None:
    """7.6 ms instead of 10: predicted as measured, with its rows, and what is not known."""
    advice = only(advise(group(fp8=FP8)), ADOPT)
    assert advice.gain is not None and advice.gain.point == pytest.approx(10 / 7.6, rel=1e-3)
    assert advice.gain.low < advice.gain.point < advice.gain.high and advice.recipe == "--dtypes bf16,fp8"
    assert "fp8bench train --dtypes bf16,fp8" in advice.sentence
    assert {ground.row for ground in advice.grounds} == {f"{advice.settings[0]}/bf16", advice.case}


def test_what_all_calls_say_is_within_what_is_predicted() -> None:
    """A step whose fastest calls are 1.32x as fast, and all calls 1.1x to 1.2x: either may be seen once more. Where
    they contradict each other beyond the noise, all calls count."""
    made = basis(group(fp8=FP8))
    (case,) = (key for key in made.findings if key.endswith("/fp8"))
    uneven = replace(made.findings[case], typical=Interval(1 / 1.15, 1 / 1.2, 1 / 1.1, 0.99))
    (pair,) = replace(made, findings={**made.findings, case: uneven}).cases
    labelled = replace(uneven, labels=(Label.UNEVEN,))
    (other,) = replace(made, findings={**made.findings, case: labelled}).cases
    assert other.speed is not None and other.speed.point == pytest.approx(1.15)
    gain = predicted(pair)
    assert gain is not None and gain.low < 1.1 < gain.point < gain.high
    assert gain.point == pytest.approx(1.316, rel=0.01)


SMALL = {"gemm": 1000, "optimizer_step": 5000, "elementwise": 4000}


@for_each(
    ("bf16", "fp8", "rule", "gain", "words"),
    [
        (SMALL, {**SMALL, "cast": 50, "gemm": 500}, "amdahl", 1.047, "not surely the 10% that are worth it; do"),
        (BF16, {**FP8, "cast": 4000}, "casts", 0.909, "keep bf16: fp8 takes 10% longer (0.909x); do casts leave what"),
        # The optimizer, which no product is, took three quarters of the time less.
        (BF16, {"optimizer_step": 100, "elementwise": 100, "gemm": 2000, "cast": 1}, "amdahl", None, "is not alike"),
    ],
)  # fmt: skip
def test_why_nothing_is_done(
    bf16: dict[str, int], fp8: dict[str, int], rule: str, gain: float | None, words: str
) -> None:
    advice = only(advise(group(bf16=bf16, fp8=fp8)), NOTHING)
    assert advice.rule == rule and words in advice.sentence
    assert (advice.gain and advice.gain.point) == (gain and pytest.approx(gain, abs=2e-3))


def test_what_is_worth_it_is_a_persons_own_choice() -> None:
    """A gain of 32% against thresholds; without a verdict the speed is not known."""
    only(advise(group(fp8=FP8), least=0.3), ADOPT)
    only(advise(group(fp8=FP8), least=0.4), NOTHING)
    made = basis(group(fp8=FP8))
    (case,) = (key for key in made.findings if key.endswith("/fp8"))
    unsure = replace(made.findings[case], verdict=Verdict.UNSURE, ratio=None, why="it was throttled")
    advice = only(advised(replace(made, findings={**made.findings, case: unsure})), NOTHING)
    assert advice.gain is None and "its speed is not known here" in advice.sentence


def test_an_emulated_precision_has_no_advice_on_speed() -> None:
    """However fast it seems; one piece of advice for several settings."""
    quick = {**BF16, "gemm": 1}
    (advice,) = advise(*(group({**NANO, "batch": batch}, level=Level.EMULATED, fp8=quick) for batch in (1, 2))).advice
    assert (advice.kind, advice.rule, advice.gain, advice.recipe, advice.case) == (NOTHING, "native", None, "", "")
    assert len(advice.settings) == 2 and "because it is emulated" in advice.sentence


@for_each("micros", [9000, 5000])
def test_a_model_as_it_came_gains_no_more_than_what_multiplies_allows(micros: int) -> None:
    """Products are 7% of it, by the pass that looked: at most 1.075x, and a step in half the time is not believed.
    One of 1.085x is within what a look may err by, and no more than the bound is predicted."""
    lead, case = group(bf16={"unattributed": 10_000}, fp8={"unattributed": micros})
    looked = replace(lead, shares=Shares((Share(ShareKind.GEMM, "", False, 0.07, 1),), 1.0))
    (pair,) = basis([looked, case]).cases
    bound, gain = bound_of(pair), predicted(pair)
    assert bound is not None and bound.point == pytest.approx(1 / 0.93) and gain is not None
    assert gain.low <= gain.point <= gain.high <= bound.high
    advice = only(advise([looked, case]), NOTHING)
    assert advice.gain is None and "allows 1.08x at most" in advice.sentence
    unbound = predicted(basis([lead, case]).cases[0])
    assert unbound is not None and unbound.point == pytest.approx(10_000 / micros, rel=1e-3)
    beside = record("fp8", {"unattributed": 9217})
    adopted = only(advise([looked, beside], least=0.05), ADOPT)
    assert adopted.gain is not None and adopted.gain.point == adopted.gain.high == pytest.approx(1 / 0.93)


def test_a_stage_that_gains_nothing_stays_high() -> None:
    advice = only(advise(*STAGES), SCHEDULE)
    assert advice.rule == "stages" and "take fp8 for training (1.32x), and bf16 for" in advice.sentence


def untimed(side: int = 2048) -> list[Record]:
    """A step in bf16 and mxfp8, so that its nvfp4 can be projected alone; its products are of that size."""
    lead, case = model(side)
    return [lead, replace(case, case=replace(case.case, precision="mxfp8"))]


def projected(found: Advised) -> list[Advice]:
    return [advice for advice in found.advice if advice.rule == "projection"]


def test_labels_are_told_with_all_that_rests_on_these_times() -> None:
    """Of the case, of its reference, and of the products of a projection; remarks cast no doubt."""
    made = basis(group(fp8={**BF16, "cast": 100}))
    reference, case = made.findings
    labels = {case: (Label.NOISY, Label.POWER_CAPPED), reference: (Label.CONTENDED, Label.NOISY)}
    findings = {name: replace(made.findings[name], labels=several, floor=0.5) for name, several in labels.items()}
    advice = only(advised(replace(made, findings=findings)), NOTHING)
    assert advice.doubtful and "fp8 perhaps takes 1% longer" in advice.sentence
    assert advice.sentence.endswith("; labelled noisy; its reference labelled contended")
    made = basis(untimed(), *squares(0.5, 0.8, 1.4, 1.9))
    noisy = {
        name: replace(found, labels=(Label.NOISY,)) if found.case.workload == "gemm" else found
        for name, found in made.findings.items()
    }
    (advice,) = projected(advised(replace(made, findings=noisy)))
    assert advice.doubtful
    assert advice.sentence.endswith("; its reference labelled work-mismatch; products labelled noisy")


def test_layers_that_a_study_found_stay_high() -> None:
    """With the map that kept the loss; between nothing and what it gains with all layers."""
    advice = only(advise(group(fp8=FP8), studies=(study(0.1, 0.005),)), ROUTE)
    assert advice.precision_map == (("head", "bf16"),) and "--precision-map head=bf16" in advice.recipe
    assert "leave head in bf16 with fp8; the loss is then +0.5% instead of +10.0%" in advice.sentence
    assert advice.gain is not None and advice.gain.low == 1 and advice.gain.high > 1.3
    assert all(advice.kind is not ROUTE for advice in advise(group(fp8=FP8), studies=(study(0.001),)).advice)


def test_a_map_that_says_nothing_is_told_by_what_stays_high() -> None:
    """A suite leaves its head high without a map: the map of all other layers is empty."""
    low, high = study(0.1, 0.005).candidates
    made = replace(low, precision_map=(("head", "fp8"),)), replace(high, precision_map=())
    records = group(fp8=FP8)
    records[1] = replace(records[1], case=replace(records[1].case, precision_map=made[0].precision_map))
    advice = only(advise(records, studies=(replace(study(), candidates=made),)), ROUTE, "fp8{head=fp8}")
    assert advice.recipe == "--dtypes bf16,fp8 --precision-map head=bf16" and advice.precision_map == (
        ("head", "bf16"),
    )
    adopted = advise(records)
    assert only(adopted, ADOPT, "fp8{head=fp8}").recipe == "--dtypes bf16,fp8 --precision-map head=fp8"
    assert not [each for each in adopted.answers if "{" in each.measure], "nobody can type a mode with its map"


def test_layers_below_break_even_stay_high() -> None:
    """They predict nothing where nobody knows a bound: no phase is marked, and nobody looked."""
    coverage = Coverage((holder("big", "linear", 90), holder("small", "linear", 10, side=600)), flops=100)
    whole = {"unattributed": 10_000}
    for bf16, nvfp4, known in ((BF16, FP8, True), (whole, {"unattributed": 7600}, False)):
        records = [record("bf16", bf16, reference=True), record("nvfp4", nvfp4, coverage=coverage)]
        advice = only(advise(records, *squares(0.5, 0.8, 1.4, 1.9, 2.0)), ROUTE, "nvfp4")
        assert advice.precision_map == (("small", "bf16"),) and advice.rule == "shapes"
        assert "10% of product FLOPs" in advice.sentence
        assert (advice.gain is not None, bool(advice.case)) == (known, known)


def test_a_step_that_was_not_timed_is_projected_from_its_products() -> None:
    """60% of it are products of 2048, 1.4 times as fast in nvfp4: 1.21x, which the step itself would have to show."""
    products = squares(0.5, 0.8, 1.4, 1.9)
    (advice,) = projected(advise(untimed(), *products))
    assert advice.kind is ADOPT and advice.gain is not None and advice.gain.point == pytest.approx(1.207, rel=0.01)
    assert advice.gain.low < advice.gain.point < advice.gain.high and "--check does" in advice.sentence
    assert advice.case == f"{advice.settings[0]}/nvfp4"
    assert {ground.row.partition("[")[0] for ground in advice.grounds} == {"transformer", "gemm"}
    assert [advice.kind for advice in projected(advise(untimed(), *products, least=0.3))] == [NOTHING]


def test_a_projection_wants_all_three_products_of_a_layer() -> None:
    """Forward alone would say 1.4; of 1.4, 2.8 and 2.8 the mean of times counts. A forward pass has but the first."""
    kinds = {"forward": 1.4, "input-gradient": 2.8, "weight-gradient": 2.8}
    products = [
        group({"m": side, "n": side, "k": side, "product": kind}, workload="gemm", bf16={"gemm": 8000},
              nvfp4={"gemm": round(8000 / speed)})
        for kind, speed in kinds.items() for side in (1024, 2048, 4096)
    ]  # fmt: skip
    (advice,) = projected(advise(untimed(), *products))
    ratio = (1 / 1.4 + 2 / 2.8) / 3
    assert advice.gain is not None and advice.gain.point == pytest.approx(1 / (0.4 + 0.6 * ratio), rel=0.01)
    assert not projected(advise(untimed(), *products[:6]))


def test_nothing_is_projected_beyond_what_was_timed() -> None:
    """Nor of a mode that the step was timed in, nor from products of which too few sizes are known."""
    products = squares(0.5, 0.8, 1.4, 1.9)
    for step in (untimed(256), untimed(16384), model(2048)):
        assert not projected(advise(step, *products))
    assert not projected(advise(untimed(), *squares(1.5, 1.6)))


times = st.integers(500, 50_000)
steps = st.fixed_dictionaries({"gemm": times, "optimizer_step": times, "elementwise": times})


@settings(max_examples=30, deadline=None)
@given(bf16=steps, fp8=steps, cast=times, emulated=st.booleans(), least=st.floats(0, 0.9))
def test_no_advice_is_above_amdahls_bound(
    bf16: dict[str, int], fp8: dict[str, int], cast: int, emulated: bool, least: float
) -> None:
    """Nor is there any on the speed of an emulation; every adoption names rows and a recipe."""
    level = Level.EMULATED if emulated else Level.NATIVE
    made = basis(group(bf16=bf16, level=level, fp8={**fp8, "cast": cast}), least=least)
    found = advised(made)
    (pair,) = made.cases
    bound, gain = bound_of(pair), predicted(pair)
    whole = sum(bf16.values())
    assert bound is not None and bound.point == pytest.approx(whole / (whole - bf16["gemm"]), rel=0.01)
    assert found.advice and all(each.kind in (ADOPT, NOTHING) for each in found.advice)
    for each in found.advice:
        if each.gain is not None:
            assert not emulated and each.gain.low <= each.gain.point <= each.gain.high <= bound.high
            assert each.gain.point <= bound.point
        if each.kind is ADOPT:
            assert not emulated and each.grounds and each.recipe and each.gain is not None
            assert pair.speed is not None and pair.speed.low >= 1 + least
    assert (gain is None) == emulated
    assert {Phase.GEMM} < pair.touched


STEPS = 200


def falling(pace: float) -> list[float]:
    """A loss that falls at so many times the usual pace."""
    return [1.8 + 3.7 * (1 + pace * step / 15) ** -0.7 for step in range(1, STEPS + 1)]


def trained(*paces: float, spread: float = 0.0, trial: int = 0) -> JudgedTraining:
    """fp8 at these paces, a seed each; losses of a seed differ by the spread."""
    draw, found = random.Random(trial), list[StreamLine]()
    for seed, pace in enumerate(paces):
        shift = 1 + draw.gauss(0, spread)
        own = 1 + 1e-4 * seed  # seeds whose references have the same losses are one
        found += rows("bf16", seed, [loss * own for loss in falling(1.0)])
        found += rows("fp8", seed, [loss * own * shift for loss in falling(pace)])
    return of_lines(training(steps=STEPS, seeds=len(paces)), found)


def of_lines(made: Training, found: Sequence[StreamLine]) -> JudgedTraining:
    return JudgedTraining(KeptTraining(made, tuple(found), True, "x/steps.jsonl"))


def cost(learned: JudgedTraining | None = None, level: Level = Level.NATIVE, joules: float = 1.0) -> Cost:
    lead, case = group(fp8=FP8, level=level)
    records = [replace(lead, energy=use([2.0, 2.02, 1.98])), replace(case, energy=use([joules] * 3))]
    (found,) = costs_of(basis(records, training=learned))
    return found


def test_losses_are_those_of_the_model_that_was_trained() -> None:
    """Named by its own make; of the model that was measured there is nothing to doubt."""
    learned = trained(*[1.0] * 5)
    was = learned.kept.training
    request = replace(was.request, settings=replace(was.request.settings, make="net.py:make"))
    own = replace(learned, kept=replace(learned.kept, training=replace(was, request=request)))
    measured = group({"make": "net.py:make", "pass": "training"}, workload="model", fp8=FP8)
    models = [costs_of(basis(records, training=own))[0].model for records in (group(fp8=FP8), measured)]
    assert models == ["net.py:make", ""] and cost(learned).model == was.request.settings.model


@for_each(("count", "items"), [(3, 3), (5, 1)])
def test_the_same_advice_about_many_settings_is_one_piece(count: int, items: int) -> None:
    """With how many are alike, and the least speed of them; a few are told each by itself."""
    slow = {**FP8, "gemm": 9000}
    groups = [group({**NANO, "batch": number}, fp8={**slow, "cast": 600 * number}) for number in range(1, count + 1)]
    (told, *_) = advice_elements(advise(*groups))
    assert isinstance(told, Items) and len(told.items) == items
    assert ("the like in 4 more settings, down to 0." in str(told.items[0])) == (items == 1)


def test_other_reasons_are_other_advice() -> None:
    """What failed is not like what has a doubtful label, and results that are not finite are an answer."""
    reasons = ("out of memory (8 GiB)", "its state is not finite: 2 of 9", "no kernel", "labelled no-work (of 3)")
    groups = [group({**NANO, "batch": number}, fp8=FP8) for number in range(1, 5)]
    for records, reason in zip(groups, reasons, strict=True):
        records[1] = replace(records[1], status=Status.FAILED, timing=None, reason=reason)
    found = advise(*groups)
    (told, *_) = advice_elements(found)
    assert isinstance(told, Items) and len(told.items) == 4
    assert all(reason in str(item) for reason, item in zip(reasons, told.items, strict=True))
    assert [each.met for each in found.answers if each.rule == "errors"] == [Met.UNKNOWN, Met.NO, *2 * [Met.UNKNOWN]]


def test_a_case_without_a_verdict_says_nothing_of_its_products() -> None:
    lead, case = group(fp8=FP8)
    labelled = {case.case.id: Finding(case.case, Verdict.UNSURE, ratio=HALF, hard=(Label.FALLBACK,))}
    found = advised(Basis(run([lead, case]), labelled))
    assert answer(found, "amdahl").met is Met.UNKNOWN


@for_each(("level", "words"), [(0.99, "2.00x [1.60, 2.50]"), (0.0, "2.00x (1.60 to 2.50)")])
def test_a_range_is_not_told_as_an_interval(level: float, words: str) -> None:
    gain = replace(HALF, level=level).inverse
    assert gain_text(gain) == words and speed(gain).text == words


def test_time_to_the_same_loss_is_that_of_a_step_times_steps() -> None:
    """A step of 7.6 ms instead of 10, and nine tenths of the pace: 0.76 / 0.9; half the joules, over 0.9."""
    found = cost(trained(*[0.9] * 5))
    assert found.speed is not None and found.speed.point == pytest.approx(10 / 7.6, rel=0.01)
    assert found.time is not None and found.time.point == pytest.approx(0.76 / 0.9, rel=0.02)
    assert found.joules is not None and found.joules.point == pytest.approx(0.5)
    assert found.energy is not None and found.energy.point == pytest.approx(0.5 / 0.9, rel=0.02)
    assert found.energy.low < found.energy.point < found.energy.high
    assert found.hours is not None and found.hours == pytest.approx(STEPS * 0.01 / 3600, rel=0.05)
    assert found.energy_used == pytest.approx(400) and found.why == ""
    money = found.money(2.5)
    assert money is not None and money.point == pytest.approx(2.5 * found.hours * found.time.point)


def test_the_interval_holds_seeds_and_rounds() -> None:
    """Seeds that differ make it wider, on both sides of what they are in the mean."""
    alike, differing = cost(trained(*[0.9] * 5)), cost(trained(*[0.9] * 5, spread=0.004))
    assert alike.time is not None and differing.time is not None
    assert differing.time.half_width > 3 * alike.time.half_width > 0
    assert differing.time.low < 0.76 / 0.9 < differing.time.high and differing.time.level == 0.95


@for_each(
    ("learned", "why"),
    [
        (None, "no training was named (--training)"),
        (trained(*[0.9] * 4), "5 seeds are needed, and there are 4"),
        (trained(*[0.1] * 5), "too far from its reference's"),
    ],
)
def test_without_a_training_nothing_is_said_of_a_loss(learned: JudgedTraining | None, why: str) -> None:
    found = cost(learned)
    assert found.time is None and found.energy is None and why in found.why and found.money(1.0) is None


def test_an_emulated_precision_has_a_loss_and_no_time() -> None:
    found = cost(trained(*[0.9] * 5), Level.EMULATED)
    assert (found.speed, found.time, found.joules, found.hours) == (None, None, None, None)
    assert found.gap is not None and "emulated" in found.why


@pytest.mark.slow
def test_intervals_hold_the_truth() -> None:
    """Of 40 trainings whose seeds differ by 0.4% of the loss: 95% of the intervals of five seeds, within its noise."""
    costs = [cost(trained(*[1.0] * 5, spread=0.004, trial=trial)) for trial in range(40)]
    assert sum(found.time is not None and found.time.low <= 0.76 <= found.time.high for found in costs) >= 34


def late(gap: float, begins: int, steps: int = 200) -> JudgedTraining:
    """fp8 whose loss lies above bf16's from that step on, in five seeds; before it by noise of either sign."""
    found: list[StreamLine] = []
    for seed in range(5):
        base = curve(steps, 2.0 + 0.01 * seed)
        noise = 1 + 0.001 * (-1) ** seed
        found += rows("bf16", seed, base)
        found += rows("fp8", seed, [loss * ((1 + gap) if step >= begins else noise) for step, loss in enumerate(base)])
        found += [held_out("bf16", seed, steps, 2.1), held_out("fp8", seed, steps, 2.1 * (1 + gap + 1e-4 * seed))]
    return of_lines(training(steps=steps), found)


def test_a_precision_that_does_harm_late_is_left_before() -> None:
    """From 60% of the steps on: so many steps of its speed are predicted, and no adoption."""
    found = advise(group(fp8=FP8), training=late(0.05, 120))
    advice = only(found, SCHEDULE)
    assert "first 60% of the steps (120 of 200)" in advice.sentence
    assert advice.gain is not None and advice.gain.point == pytest.approx(1 / (0.6 * 0.76 + 0.4), rel=0.01)
    assert answer(found, "learns").met is Met.NO
    assert "it does not learn as well" in only(found, NOTHING).sentence


def test_one_that_does_none_needs_no_schedule() -> None:
    """Nor is there one where it does harm from the first step on, or too few steps were trained to tell."""
    for harmless in (late(0.0, 100), late(0.05, 0), late(0.05, 20, steps=40)):
        assert harm_of(harmless, "fp8") is None
    learned = of_lines(training(), lines({"fp8": [0.0001, -0.0001, 0.0002, -0.0002, 0.0]}))
    adopted = only(advise(group(fp8=FP8), training=learned), ADOPT)
    assert "it learns as well (within noise" in adopted.sentence
    assert not math.isnan(cost(learned).hours or 0.0)


def test_of_several_settings_what_most_say() -> None:
    """With how many do, and at which one the figure is; parameters that all share are left out."""
    sizes = [
        group({**NANO, "batch": batch}, fp8={**FP8, "cast": cast}) for batch, cast in ((1, 4000), (2, 600), (4, 500))
    ]
    (table,) = checklist(advise(*sizes), shared=False)
    row = next(row for row in table.rows if row[1].text == "Is the whole step faster?")
    assert row[2].text == "yes (2 of 3)" and row[3].text.endswith("at transformer[batch=2]@cuda:0")
