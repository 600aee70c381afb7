"""The checklist's rules on runs whose answers are known; then advice: planted truths, and what no advice may do."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8bench.features.advise.basis import AdviceBasis, show_gain
from fp8bench.features.advise.decide import advise as advise_on
from fp8bench.features.advise.rules import compute_amdahl_bound
from fp8bench.features.advise.values import AdviceKind, AdviceQuestion, AdviceRuleOutcome
from fp8bench.features.advise.view import advice_items, make_question_tables, render_page
from fp8bench.features.sensitivity.study import LoweredLayersTrial, LoweredUnit, SensitivityStudy
from fp8bench.features.train.values import StoredTraining
from fp8bench.features.train.verdicts.summary import JudgedTraining
from fp8bench.model import (
    Finding,
    Interval,
    Label,
    Level,
    MemoryUse,
    Phase,
    Record,
    Share,
    ShareKind,
    Shares,
    Status,
    Verdict,
)
from fp8bench.model.step import Coverage, Holder
from tests.advised import BF16, FP8, NANO, advise, answer, basis, group, only, record, run
from tests.counts import for_each
from tests.learning_curves import lines, training
from tests.runs import error


def met(rule: str, *groups: list[Record], mode: str = "fp8", **more: object) -> AdviceRuleOutcome:
    return answer(advise(*groups, **more), rule, mode).met


HALF = Interval(0.5, 0.4, 0.625, 0.99)
TINY, WHOLE = {"gemm": 500, "optimizer_step": 9500}, {"unattributed": 8000}


@for_each(
    ("rule", "records", "expected"),
    [
        ("amdahl", group(fp8=FP8), AdviceRuleOutcome.YES),
        # An emulation does not show how fast products are, and 5% of a step is too little anyway.
        ("amdahl", group(bf16=TINY, level=Level.EMULATED, fp8=TINY), AdviceRuleOutcome.NO),
        ("amdahl", group(level=Level.EMULATED, fp8=FP8), AdviceRuleOutcome.NOT_MEASURED),
        # A compiled step has no phase of casts.
        ("amdahl", group(bf16=WHOLE, fp8=WHOLE), AdviceRuleOutcome.NOT_MEASURED),
        ("casts", group(bf16=WHOLE, fp8=WHOLE), AdviceRuleOutcome.NOT_MEASURED),
        ("memory", group(fp8=FP8), AdviceRuleOutcome.NOT_MEASURED),
        *(
            ("casts", group(fp8={**BF16, "gemm": gemm, "cast": cast}), expected)
            for gemm, cast, expected in (
                (3000, 600, AdviceRuleOutcome.YES),
                (3000, 4000, AdviceRuleOutcome.NO),
                (6000, 600, AdviceRuleOutcome.NO),
                (6500, 1, AdviceRuleOutcome.NO),
            )
        ),
    ],
)
def test_each_rule_gives_its_advice(rule: str, records: list[Record], expected: AdviceRuleOutcome) -> None:
    assert met(rule, records) is expected


ESTIMATED = " (estimated from shares of the step)"


def test_a_model_as_it_came_has_shares_in_place_of_phases() -> None:
    """Products take 60% of 10 ms there, and 40% of 7.5 ms with 10% casts: an estimate, so no bound."""
    profiled = [
        Shares((Share(ShareKind.GEMM, "", False, 0.6, 1),), 1.0),
        Shares((Share(ShareKind.GEMM, "", False, 0.4, 1), Share(ShareKind.CAST, "", False, 0.1, 1)), 1.0),
    ]
    lead, case = group(bf16={"unattributed": 10_000}, fp8={"unattributed": 7500})
    records = [replace(lead, shares=profiled[0]), replace(case, shares=profiled[1])]
    advised = advise(records)
    amdahl = answer(advised, "amdahl")
    casts = answer(advised, "casts")
    assert (amdahl.met, amdahl.figure) == (
        AdviceRuleOutcome.YES,
        "products are 60% of the step; with products 2.00x as fast, the step would be 1.43x as fast" + ESTIMATED,
    )
    assert casts.met is AdviceRuleOutcome.YES and casts.figure.startswith("products 2.00x, with casts 1.60x (estimated")
    unprofiled = advise([lead, case])
    assert (
        "--shares shows them" in answer(unprofiled, "amdahl").figure
        and answer(unprofiled, "casts").met is AdviceRuleOutcome.NOT_MEASURED
    )


def test_the_suggested_command_of_a_profile_is_a_profile() -> None:
    make = {"make": "my_pkg:make", "pass": "training", "optimizer": "adamw", "compile": "no"}
    forward = {**make, "pass": "forward", "optimizer": "none"}
    training = group(make, workload="model", fp8=FP8)
    measures = {
        each.rule: each.measure for each in advise(training).answers if each.met is AdviceRuleOutcome.NOT_MEASURED
    }
    assert measures["layers"] == "fp8bench sensitivity my_pkg:make --dtype fp8"
    assert measures["learns"] == "fp8bench train my_pkg:make --dtypes bf16,fp8 --seeds 5"
    alone = answer(advise(group(forward, workload="model", fp8=FP8)), "memory").measure
    assert alone == "fp8bench profile my_pkg:make --forward --dtypes fp8"


def holder(name: str, kind: str, flops: int, converted: bool = True) -> Holder:
    return Holder(name, kind, (8, 8), (), flops, 1, converted, "" if converted else "no product of ours for it")


def test_the_converted_share_of_a_model_is_reported() -> None:
    coverage = Coverage(
        (holder("attn", "linear", 18), holder("mlp", "experts", 73, False), holder("head", "head", 9)), flops=100
    )
    advised = advise([record("bf16", BF16, reference=True), record("fp8", FP8, coverage=coverage)])
    covered = answer(advised, "coverage")
    assert covered.met is AdviceRuleOutcome.NO and "mlp is not: no product" in covered.figure
    assert not {"coverage", "compile"} & {each.rule for each in advise(group(fp8=FP8)).answers}


def test_training_in_fp8_saves_no_memory_and_the_copies_are_named() -> None:
    before = MemoryUse(1000 << 20, (("weights", 400 << 20), ("optimizer", 600 << 20)))
    after = MemoryUse(1010 << 20, (*before.roles, ("low_precision_weights", 10 << 20)))
    lead = record("bf16", BF16, reference=True, memory=before)
    advised = answer(advise([lead, record("fp8", FP8, memory=after)]), "memory")
    assert advised.met is AdviceRuleOutcome.NO and advised.figure == (
        "1.010x of bf16's peak; unchanged: weights (400 MiB), optimizer state (600 MiB); larger: "
        "low-precision copies of weights (10.0 MiB instead of 0 B)"
    )
    # A saving is in activations, which are named too.
    reference = record(
        "bf16", BF16, reference=True, memory=replace(before, roles=(*before.roles, ("activations", 90 << 20)))
    )
    smaller = replace(after, peak=900 << 20, roles=(*after.roles, ("activations", 40 << 20)))
    saved = answer(advise([reference, record("fp8", FP8, memory=smaller)]), "memory")
    assert "0.900x of bf16's peak; smaller: activations (40.0 MiB instead of 90.0 MiB); unch" in saved.figure
    assert met("memory", [lead, record("fp8", FP8, memory=MemoryUse(500 << 20))]) is AdviceRuleOutcome.YES
    assert (
        met("memory", [lead, record("fp8", FP8, memory=after, level=Level.EMULATED)]) is AdviceRuleOutcome.NOT_MEASURED
    )


def study(*gaps: float) -> SensitivityStudy:
    """Losses of candidates, relative to the reference's 2.0: all layers low, then with a high head."""
    maps = ((), (("head", "bf16"),), (("head", "bf16"), ("blocks.0", "bf16")))
    low = (("blocks.0.mlp", "head"), ("blocks.0.mlp",), ())
    candidates = [
        LoweredLayersTrial(f"c{n}", "", "fp8", maps[n], low[n], losses=(2 * (1 + gap),)) for n, gap in enumerate(gaps)
    ]
    probes = (
        LoweredLayersTrial("head", "head", "bf16", low=("head",), losses=(2.2,)),
        LoweredLayersTrial("blocks.0.mlp", "mlp", "bf16", low=("blocks.0.mlp",), losses=(2.0,)),
    )
    return SensitivityStudy(
        "transformer",
        (("size", "gpt2-124m"),),
        "cuda:0",
        "fp8",
        "bf16",
        "native",
        LoweredUnit.LAYER,
        50,
        0.01,
        0,
        LoweredLayersTrial("reference", "", "bf16", losses=(2.0,)),
        (LoweredLayersTrial("draw 1", "", "bf16", draw=1, losses=(2.004,)),),
        probes,
        tuple(candidates),
        started="2026-01-05",
        path="study.json",
    )


@for_each(
    ("gaps", "expected"),
    [((0.005,), AdviceRuleOutcome.YES), ((0.1, 0.005), AdviceRuleOutcome.NO), ((), AdviceRuleOutcome.NOT_MEASURED)],
)
def test_a_study_names_the_layers_that_stay_high(gaps: tuple[float, ...], expected: AdviceRuleOutcome) -> None:
    assert met("layers", group(fp8=FP8), studies=(study(*gaps),)) is expected
    if len(gaps) > 1:  # with the study's map, the case is within the tolerance
        mapped = group(fp8=FP8)
        mapped[1] = replace(mapped[1], case=replace(mapped[1].case, precision_map=(("head", "bf16"),)))
        bears = next(each for each in advise(mapped, studies=(study(*gaps),)).answers if each.rule == "layers")
        assert bears.met is AdviceRuleOutcome.YES and bears.figure.startswith("layers low: 1, loss +0.5%")
    unit = advise(group(fp8_unit=FP8), studies=(study(*gaps),)).answers
    assert unit and not [each for each in unit if each.rule == "layers"], "no layer of it can stand in another model"
    other = replace(study(*gaps), params=(("size", "nano"),))
    assert met("layers", group(fp8=FP8), studies=(other,)) is AdviceRuleOutcome.NOT_MEASURED


ADOPT, ROUTE, NOTHING = AdviceKind


def test_a_step_that_gains_is_adopted() -> None:
    advice = only(advise(group(fp8=FP8)), ADOPT)
    assert advice.gain is not None and advice.gain.point == pytest.approx(10 / 7.6, rel=1e-3)
    assert advice.recipe == "--dtypes bf16,fp8"
    assert "fp8bench train --dtypes bf16,fp8" in advice.sentence
    assert {ground.row for ground in advice.grounds} == {f"{advice.settings[0]}/{mode}" for mode in ("bf16", "fp8")}


@for_each(
    ("errors", "kind", "words"),
    [
        (
            {"gradient_error": 0.93},
            NOTHING,
            "its errors are too large; are its errors small enough: no, large gradient",
        ),
        ({"gradient_error": 0.07}, ADOPT, "as fast as in bf16; moderate gradient error (7.0e-02, limit 3.0e-01)"),
        (
            {"gradient_error": 0.005, "loss_error": 0.009},
            ADOPT,
            ", limit 3.0e-01), moderate loss error",
        ),
        ({"gradient_error": 0.005, "loss_error": 0.02}, NOTHING, "large loss error"),
        ({}, ADOPT, "no error was measured"),
    ],
)
def test_a_large_error_is_not_adopted_and_others_are_named(
    errors: dict[str, float], kind: AdviceKind, words: str
) -> None:
    lead, case = group(fp8=FP8)
    measured = tuple(error(metric, value) for metric, value in errors.items())
    assert words in only(advise([lead, replace(case, measurements=measured)]), kind).sentence


SMALL = {"gemm": 1000, "optimizer_step": 5000, "elementwise": 4000}


@for_each(
    ("bf16", "fp8", "rule", "gain", "words"),
    [
        (
            SMALL,
            {**SMALL, "cast": 50, "gemm": 500},
            "amdahl",
            1.047,
            "may be below the 10% that make it worthwhile; would faster products alone be worthwhile: no, products",
        ),
        (
            BF16,
            {**FP8, "cast": 4000},
            "casts",
            0.909,
            "keep bf16: fp8 takes 10% longer (0.909x); do the products gain",
        ),
        # The optimizer, which has no products, saved three quarters of its time.
        (
            BF16,
            {"optimizer_step": 100, "elementwise": 100, "gemm": 2000, "cast": 1},
            "amdahl",
            None,
            "differ in something else",
        ),
    ],
)
def test_advice_to_do_nothing_has_a_reason(
    bf16: dict[str, int], fp8: dict[str, int], rule: str, gain: float | None, words: str
) -> None:
    advice = only(advise(group(bf16=bf16, fp8=fp8)), NOTHING)
    assert advice.rule == rule and words in advice.sentence
    assert (advice.gain and advice.gain.point) == (gain and pytest.approx(gain, abs=2e-3))


def test_thresholds_decide_what_is_worth_adopting() -> None:
    only(advise(group(fp8=FP8), min_gain=0.3), ADOPT)
    only(advise(group(fp8=FP8), min_gain=0.4), NOTHING)
    evidence = basis(group(fp8=FP8))
    (case,) = (key for key in evidence.findings if key.endswith("/fp8"))
    unsure = replace(evidence.findings[case], verdict=Verdict.UNSURE, ratio=None, why="it was throttled")
    advice = only(advise_on(replace(evidence, findings={**evidence.findings, case: unsure})), NOTHING)
    assert advice.gain is None and "whose speed is unknown here" in advice.sentence


def test_an_emulated_precision_has_no_advice_on_speed() -> None:
    quick = {**BF16, "gemm": 1}
    (advice,) = advise(*(group({**NANO, "batch": batch}, level=Level.EMULATED, fp8=quick) for batch in (1, 2))).advice
    assert (advice.kind, advice.rule, advice.gain, advice.recipe) == (NOTHING, "native", None, "")
    assert len(advice.settings) == 2 and "it is emulated here" in advice.sentence


@for_each("micros", [9000, 5000])
def test_a_model_as_it_came_gains_no_more_than_what_multiplies_allows(micros: int) -> None:
    """Products are 7% in the profiling pass, so the limit is 1.075x and half the time is not believed.

    1.085x is within the pass's error.
    """
    lead, case = group(bf16={"unattributed": 10_000}, fp8={"unattributed": micros})
    profiled = replace(lead, shares=Shares((Share(ShareKind.GEMM, "", False, 0.07, 1),), 1.0))
    bound = compute_amdahl_bound(basis([profiled, case]).cases[0])
    assert bound is not None and bound.point == pytest.approx(1 / 0.93)
    advice = only(advise([profiled, case]), NOTHING)
    assert advice.gain is None and "allows at most 1.08x" in advice.sentence
    only(advise([profiled, record("fp8", {"unattributed": 9217})], min_gain=0.05), ADOPT)


def test_labels_are_named_in_advice_that_depends_on_these_times() -> None:
    evidence = basis(group(fp8={**BF16, "cast": 100}))
    reference, case = evidence.findings
    labels = {case: (Label.NOISY, Label.POWER_CAPPED), reference: (Label.CONTENDED, Label.NOISY)}
    findings = {name: replace(evidence.findings[name], labels=several, floor=0.5) for name, several in labels.items()}
    advice = only(advise_on(replace(evidence, findings=findings)), NOTHING)
    assert advice.doubtful and "fp8 perhaps takes 1% longer" in advice.sentence
    assert advice.sentence.endswith("; labelled noisy; its reference labelled contended")


def test_layers_that_a_study_found_stay_high() -> None:
    advice = only(advise(group(fp8=FP8), studies=(study(0.1, 0.005),)), ROUTE)
    assert "--precision-map head=bf16" in advice.recipe and advice.sentence.endswith(": --precision-map head=bf16")
    assert "use fp8, but leave head in bf16; the loss is then +0.5% instead of +10.0%" in advice.sentence
    assert all(advice.kind is not ROUTE for advice in advise(group(fp8=FP8), studies=(study(0.001),)).advice)


def test_an_empty_map_is_described_by_its_high_layers() -> None:
    """A suite keeps its head high without a map, so the map of all other layers is empty."""
    low, high = study(0.1, 0.005).candidates
    trials = replace(low, precision_map=(("head", "fp8"),)), replace(high, precision_map=())
    records = group(fp8=FP8)
    records[1] = replace(records[1], case=replace(records[1].case, precision_map=trials[0].precision_map))
    advice = only(advise(records, studies=(replace(study(), candidates=trials),)), ROUTE, "fp8{head=fp8}")
    assert advice.recipe == "--dtypes bf16,fp8 --precision-map head=bf16"
    adopted = advise(records)
    assert only(adopted, ADOPT, "fp8{head=fp8}").recipe == "--dtypes bf16,fp8 --precision-map head=fp8"
    assert not [each for each in adopted.answers if "{" in each.measure], "nobody can type a mode with its map"


times = st.integers(500, 50_000)
steps = st.fixed_dictionaries({"gemm": times, "optimizer_step": times, "elementwise": times})


@settings(max_examples=30, deadline=None)
@given(bf16=steps, fp8=steps, cast=times, emulated=st.booleans(), min_gain=st.floats(0, 0.9))
def test_no_advice_is_above_amdahls_bound(
    bf16: dict[str, int], fp8: dict[str, int], cast: int, emulated: bool, min_gain: float
) -> None:
    level = Level.EMULATED if emulated else Level.NATIVE
    evidence = basis(group(bf16=bf16, level=level, fp8={**fp8, "cast": cast}), min_gain=min_gain)
    advised = advise_on(evidence)
    (pair,) = evidence.cases
    bound = compute_amdahl_bound(pair)
    whole = sum(bf16.values())
    assert bound is not None and bound.point == pytest.approx(whole / (whole - bf16["gemm"]), rel=0.01)
    assert advised.advice and all(each.kind in (ADOPT, NOTHING) for each in advised.advice)
    for each in advised.advice:
        if each.kind is ADOPT:
            assert not emulated and each.grounds and each.recipe and each.gain is not None
            assert 1 + min_gain <= each.gain.low <= 1.02 * bound.high
        assert each.gain is None or not emulated
    assert {Phase.GEMM} < pair.affected_phases


def trained(gap: float) -> JudgedTraining:
    """fp8 with a loss above bf16's by that share, in five seeds."""
    advised = lines({"fp8": [gap + off for off in (0.0001, -0.0001, 0.0002, -0.0002, 0.0)]})
    return JudgedTraining(StoredTraining(training(), tuple(advised), True, "x/steps.jsonl"))


def test_what_a_training_says_of_the_loss_decides() -> None:
    adopted = only(advise(group(fp8=FP8), training=trained(0.0)), ADOPT)
    assert "it learns as well (within noise" in adopted.sentence
    tolerated = advise(group(fp8=FP8), training=trained(0.005))
    assert answer(tolerated, "learns").met is AdviceRuleOutcome.TOLERATED
    assert "its loss is worse by +0.500% [" in only(tolerated, ADOPT).sentence
    assert "real, inside the 1% you tolerate" in only(tolerated, ADOPT).sentence
    advised = advise(group(fp8=FP8), training=trained(0.05))
    assert answer(advised, "learns").met is AdviceRuleOutcome.NO
    assert "it does not learn as well; does it learn as well: no, worse" in only(advised, NOTHING).sentence


@for_each(("count", "items"), [(3, 3), (5, 1)])
def test_the_same_advice_about_many_settings_is_one_piece(count: int, items: int) -> None:
    slow = {**FP8, "gemm": 9000}
    groups = [group({**NANO, "batch": number}, fp8={**slow, "cast": 600 * number}) for number in range(1, count + 1)]
    pieces = advice_items(advise(*groups)).items
    assert len(pieces) == items
    assert ("similar in 4 more settings, down to 0." in str(pieces[0])) == (items == 1)


def test_different_reasons_give_separate_advice() -> None:
    reasons = ("out of memory (8 GiB)", "its state is not finite: 2 of 9", "no kernel", "labelled no-work (of 3)")
    groups = [group({**NANO, "batch": number}, fp8=FP8) for number in range(1, 5)]
    for records, reason in zip(groups, reasons, strict=True):
        records[1] = replace(records[1], status=Status.FAILED, timing=None, reason=reason)
    advised = advise(*groups)
    pieces = advice_items(advised).items
    assert len(pieces) == 4
    assert all(reason in str(piece) for reason, piece in zip(reasons, pieces, strict=True))
    assert [each.met for each in advised.answers if each.rule == "errors"] == [
        AdviceRuleOutcome.NOT_MEASURED,
        AdviceRuleOutcome.NO,
        *2 * [AdviceRuleOutcome.NOT_MEASURED],
    ]


def test_a_case_without_a_verdict_says_nothing_of_its_products() -> None:
    lead, case = group(fp8=FP8)
    labelled = {case.case.id: Finding(case.case, Verdict.UNSURE, ratio=HALF, hard=(Label.FALLBACK,))}
    advised = advise_on(AdviceBasis(run([lead, case]), labelled))
    assert answer(advised, "amdahl").met is AdviceRuleOutcome.NOT_MEASURED


@for_each(("level", "words"), [(0.99, "2.00x [1.60, 2.50]"), (0.0, "2.00x (1.60 to 2.50)")])
def test_a_range_is_not_told_as_an_interval(level: float, words: str) -> None:
    gain = replace(HALF, level=level).inverse
    assert show_gain(gain) == words


def test_advice_for_several_settings_follows_the_majority() -> None:
    sizes = [
        group({**NANO, "batch": batch}, fp8={**FP8, "cast": cast}) for batch, cast in ((1, 4000), (2, 600), (4, 500))
    ]
    pays, *_ = make_question_tables(advise(*sizes), everything=True)
    row = next(row for row in pays.rows if row[1].text == "Is the whole step faster?")
    assert row[2].text == "yes (2 of 3)" and row[3].text.endswith("at transformer[batch=2]@cuda:0")


def test_three_questions_in_order_and_the_next_command_of_each() -> None:
    advised = advise(group({**NANO, "compile": "no"}, fp8=FP8))
    assert [table.caption for table in make_question_tables(advised, everything=True)] == [
        question.value for question in AdviceQuestion
    ]
    (advice, pays, following) = render_page(advised, []).parts
    assert pays.name == "question-1" and advice.name == "advice"
    commands = [str(item) for item in following.elements[1].items]  # type: ignore[union-attr]
    assert len(commands) == 3 and "fp8bench suite transformer" in commands[0] and "fp8bench train" in commands[2]


def test_two_suites_of_a_run_are_told_apart() -> None:
    advised = advise(group(fp8=FP8), group({"m": 512}, workload="gemm", fp8={**FP8, "cast": 9000}))
    pays, *_ = make_question_tables(advised, everything=False)
    steps = {row[0].text: row[2].text for row in pays.rows if row[1].text == "Is the whole step faster?"}
    assert steps == {"fp8 in transformer on cuda:0": "yes", "fp8 in gemm on cuda:0": "no"}
