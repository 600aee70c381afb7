"""What verdicts say in sentences: a test for every branch, and never more than the verdict."""

from __future__ import annotations

import math
from dataclasses import replace

from fp8bench.model import Finding, Interval, Label, Run, Scalar, Verdict
from fp8bench.model.words import REMARKS
from fp8bench.report.elements import Items, Text, Tone
from fp8bench.report.panels import panels_of
from fp8bench.report.words.speed import comparisons, doubt_of_all, over_loads, over_values, said_once, span
from tests.counts import for_each
from tests.materials import of_kind, part, shapes
from tests.runs import EMULATED, gemm, judged, phases, render, render_whole, transformer

FASTER, SLOWER, SAME, UNSURE, NONE = (
    (Verdict.FASTER, 0.5), (Verdict.SLOWER, 1.25), (Verdict.SAME, 1.01), (Verdict.UNSURE, 1.02), (Verdict.NONE, None),
)  # fmt: skip
NOISY, FEW, CAPPED = Label.NOISY, Label.FEW_SAMPLES, Label.POWER_CAPPED
# What several sentences say.
ON, UNCLEAR = "on gemm m=64 k=64", "it is not clear whether bf16 is faster than fp32"
WIDE, PACE = "the interval is too wide to tell", "it ran at the clocks that the device's power cap allows"
VARIED, RESTS = "the times varied a lot (noisy)", "it rests on few rounds (few-samples)"
SIDES: dict[str, Scalar] = {"m": 256, "n": 64, "k": 64}


def said(made: tuple[Run, dict[str, Finding]], device: str = "") -> list[Text]:
    """The sentences of all panels."""
    return [text for panel in panels_of(*made) for text in comparisons(panel, device)]


@for_each(
    ("verdicts", "sentence", "tone"),
    [
        ([FASTER], f"bf16 is 2.00x [1.98, 2.02] faster than fp32 {ON}", Tone.GOOD),
        ([SLOWER], f"bf16 is slower than fp32 {ON}: 0.800x [0.792, 0.808] its speed", Tone.BAD),
        ([SAME], f"bf16 is as fast as fp32 {ON}: 0.990x [0.980, 1.00] its speed, within 2%", Tone.PLAIN),
        ([UNSURE], f"{UNCLEAR} {ON} (0.980x [0.971, 0.990] its speed): {WIDE}", Tone.DOUBT),
        ([(Verdict.UNSURE, None, FEW)], f"{UNCLEAR} {ON}: {WIDE}; {RESTS}", Tone.DOUBT),
        ([NONE], f"bf16 was not timed {ON}", Tone.DOUBT),
        (
            [(*FASTER, NOISY, FEW)],
            f"bf16 is perhaps 2.00x [1.98, 2.02] faster than fp32 {ON}, but {VARIED} and {RESTS}",
            Tone.DOUBT,
        ),
        (
            [(*SAME, NOISY)],
            f"bf16 is perhaps as fast as fp32 {ON}: 0.990x [0.980, 1.00] its speed, within 2%, but {VARIED}",
            Tone.DOUBT,
        ),
        (
            [(*FASTER, CAPPED)],
            f"bf16 is 2.00x [1.98, 2.02] faster than fp32 {ON}; {PACE} (power-capped)",
            Tone.GOOD,
        ),
        ([(Verdict.FASTER, None)], f"bf16 is faster than fp32 {ON}", Tone.GOOD),
        ([(Verdict.SAME, None)], f"bf16 is as fast as fp32 {ON}, within 2%", Tone.PLAIN),
        ([FASTER] * 3, "bf16 is faster than fp32 in all 3 cases of gemm, 2.00x", Tone.GOOD),
        ([FASTER] * 2, "bf16 is faster than fp32 in both cases of gemm (m=64: 2.00x; m=128: 2.00x)", Tone.GOOD),
        (
            [FASTER, (Verdict.FASTER, 0.8), (Verdict.FASTER, 0.4), SLOWER],
            (
                "bf16 is faster than fp32 in 3 of 4 cases of gemm, 1.25x to 2.50x (median 2.00x); slower in 1 (m=256: "
                "0.800x)"
            ),
            Tone.PLAIN,
        ),
        ([SAME] * 3, "bf16 is as fast as fp32 in all 3 cases of gemm (within 2%)", Tone.PLAIN),
        (
            [SLOWER, SAME, SAME],
            "bf16 is slower than fp32 in 1 of 3 cases of gemm (m=64: 0.800x); as fast in 2 (within 2%)",
            Tone.PLAIN,
        ),
        (
            [(*FASTER, NOISY), (*FASTER, NOISY, FEW), (*SLOWER, FEW)],
            (
                "bf16 is perhaps faster than fp32 in 2 of 3 cases of gemm (m=64: 2.00x; m=128: 2.00x), but "
                f"{VARIED} and it rests on few rounds in 1 of them (few-samples); perhaps slower in 1 (m=192: 0.800x), "
                f"but {RESTS}"
            ),
            Tone.DOUBT,
        ),
        (
            [FASTER, UNSURE, UNSURE],
            (
                "bf16 is faster than fp32 in 1 of 3 cases of gemm (m=64: 2.00x); not clear in 2 (m=128: 0.980x; "
                f"m=192: 0.980x): {WIDE}"
            ),
            Tone.PLAIN,
        ),
        ([UNSURE] * 3, f"{UNCLEAR} in all 3 cases of gemm, 0.980x: {WIDE}", Tone.DOUBT),
        ([NONE] * 3, "bf16 was not timed in all 3 cases of gemm", Tone.DOUBT),
        (
            [(Verdict.FASTER, None), NONE],
            "bf16 is faster than fp32 in 1 of 2 cases of gemm (m=64); not timed in 1 (m=128)",
            Tone.PLAIN,
        ),
        (
            [(*FASTER, CAPPED), FASTER, FASTER],
            f"bf16 is faster than fp32 in all 3 cases of gemm, 2.00x; {PACE} in 1 of 3 (power-capped)",
            Tone.GOOD,
        ),
    ],
)
def test_one_case_and_several(
    verdicts: list[tuple[Verdict, float | None, *tuple[Label, ...]]], sentence: str, tone: Tone
) -> None:
    assert said(judged(*verdicts)) == [Text(sentence, tone)]


def test_a_step_of_several_phases_says_what_each_of_them_does() -> None:
    """For facts: what a phase gains is as sure as the whole, at most."""
    run, findings = transformer()
    fp16 = run.records[1].case.id
    own = phases(0.0209, cast=0.1, gemm=0.3, attention=0.15, accumulate=0.058, optimizer_step=0.14, elementwise=0.23)
    fact = replace(
        findings[fp16], verdict=Verdict.FASTER, best_seconds=0.0209, ratio=Interval(0.86, 0.855, 0.87, 0.99), labels=(),
        phases=own, why="",
    )  # fmt: skip
    assert said((run, findings | {fp16: fact}))[0].text == (
        "fp16 is 1.16x [1.15, 1.17] faster than bf16 on the whole step of transformer; products gain 1.94x and the "
        "rest gains 2.64x; accumulation and elementwise work take 29% of the step and do not gain; attention "
        "takes 1.29x as long and the optimizer step takes 1.20x as long; casts take 10% of the step and come on top"
    )
    doubted = replace(fact, labels=(NOISY,), floor=0.1)
    assert said((run, findings | {fp16: doubted}))[0].text == (
        "fp16 is perhaps 1.16x [1.15, 1.17] faster than bf16 on the whole step of transformer, but the times varied "
        "a lot (noisy)"
    )


def test_a_device_is_named_where_it_matters() -> None:
    assert said(judged(FASTER), "cuda:0")[0].text.endswith("on gemm m=64 k=64 on cuda:0")
    assert said(judged(*[FASTER] * 3), "cuda:0")[0].text.endswith("in all 3 cases of gemm on cuda:0, 2.00x")


def test_a_reference_alone_has_nothing_to_be_compared_with() -> None:
    for number, words in ((1, "on gemm, at 1.00 ms: there is nothing to compare it with"), (2, "in 2 cases of gemm: ")):
        run, findings = judged(*[FASTER] * number)
        alone = replace(run, records=tuple(record for record in run.records if record.is_reference))
        (text,) = said((alone, findings))
        assert text.text.startswith("fp32 alone was timed") and words in text.text
    run, findings = judged(FASTER)
    assert said((replace(run, records=run.records[:1]), {})) == []


def test_only_what_ran_natively_is_compared() -> None:
    """Emulated, skipped and failed cases have sentences of their own."""
    assert [text.text for text in said(gemm())] == ["bf16 is faster than fp32 in all 3 cases of gemm, 1.95x"]


def test_one_sentence_for_what_all_cases_share() -> None:
    panels = panels_of(*judged((*FASTER, FEW), (*SLOWER, FEW, NOISY, CAPPED)))
    shared = said_once(panels)
    assert shared == {FEW}
    assert doubt_of_all(shared) == "Every comparison here is in doubt: it rests on few rounds (few-samples)."
    (text,) = [text for panel in panels for text in comparisons(panel, said=shared)]
    assert text.text == (
        "bf16 is perhaps faster than fp32 in 1 of 2 cases of gemm (m=64: 2.00x); perhaps slower in 1 (m=128: 0.800x), "
        f"but the times varied a lot (noisy); {PACE} in 1 of 2 (power-capped)"
    )
    assert said_once(panels_of(*judged((*FASTER, FEW)))) == frozenset()
    assert said_once(panels_of(*judged(FASTER, (*FASTER, FEW)))) == frozenset() and doubt_of_all(frozenset()) == ""


def test_no_interval_is_said_to_be_none() -> None:
    run, findings = judged(FASTER)
    case = run.records[1].case.id
    findings[case] = replace(findings[case], ratio=Interval(0.5, 0.0, math.inf, 0.99))
    assert said((run, findings))[0].text == "bf16 is 2.00x [no interval] faster than fp32 on gemm m=64 k=64"


@for_each("label", sorted(set(Label) - REMARKS))
@for_each("verdict", [FASTER, SLOWER, SAME])
@for_each("number", [1, 3])
def test_no_label_that_casts_doubt_goes_unsaid(verdict: tuple[Verdict, float], label: Label, number: int) -> None:
    (text,) = said(judged(*[(*verdict, label)] * number))
    assert "perhaps" in text.text and f"({label})" in text.text and text.tone is Tone.DOUBT


def test_a_span_is_one_number_where_all_look_alike() -> None:
    assert span([2.0, 2.001]) == "2.00x"
    assert span([1.0, 3.0, 2.0]) == "1.00x to 3.00x (median 2.00x)"


def told(*wanted: dict[str, Scalar]) -> list[str]:
    run, findings = shapes(*wanted)
    (panel,) = panels_of(run, findings)
    return list(over_values(panel))


def test_layouts_are_told_by_who_is_fastest() -> None:
    """Each precision by itself: its layout and its speed are separate answers."""
    first, second = ({**SIDES, "layout": layout} for layout in ("contiguous", "channels_last"))
    assert told(first, second) == [
        "fp32 by layout (contiguous, channels_last): best 1.00 ms, 1.000x apart",
        "bf16 by layout (channels_last, contiguous): best 333 us to 500 us, 1.500x apart; speed-up 2.00x to 3.00x",
    ]
    assert told(first) == []


def test_the_range_over_values_is_told() -> None:
    """Of native cases; the default is no parameter and has its name all the same."""
    run, findings = shapes(SIDES, {**SIDES, "values": "zeros"})
    expected = [
        "fp32 by values (normal, zeros): best 1.00 ms, 1.000x apart",
        "bf16 by values (normal, zeros): best 333 us to 500 us, 1.500x apart; speed-up 2.00x to 3.00x",
    ]
    (panel,) = panels_of(run, findings)
    assert list(over_values(panel)) == expected
    assert all(one in " ".join(render_whole(run, findings, 200).split()) for one in expected)


def test_only_cases_that_differ_in_nothing_else_are_held_together() -> None:
    """Each with what tells it from the others."""
    assert told(SIDES, {**SIDES, "m": 512}) == []
    assert told(SIDES) == []
    both = told(SIDES, {**SIDES, "values": "ones"}, {**SIDES, "m": 512}, {**SIDES, "m": 512, "values": "ones"})
    assert [one.partition(" by")[0] for one in both] == ["fp32 m=256", "bf16 m=256", "fp32 m=512", "bf16 m=512"]


def loaded(
    verdicts: dict[str, tuple[Verdict, float, tuple[Label, ...]]], **more: Scalar
) -> tuple[Run, dict[str, Finding]]:
    """bf16 takes so many times as long as fp32 under each load."""
    run, findings = shapes(*({**SIDES, **more, "load": load} for load in verdicts))
    for record in run.records:
        if record.case.precision == "bf16":
            verdict, ratio, labels = verdicts[str(record.case.param("load"))]
            interval = Interval(ratio, ratio * 0.99, ratio * 1.01, 0.99)
            findings[record.case.id] = replace(
                findings[record.case.id], verdict=verdict, ratio=interval, labels=labels, best_seconds=ratio * 1e-3
            )
    return run, findings


def over(made: tuple[Run, dict[str, Finding]]) -> list[str]:
    return [text for panel in panels_of(*made) for text in over_loads(panel)]


def test_where_the_sign_turns_between_loads_that_is_the_answer() -> None:
    """The first sentence of terminal and page; what is in doubt is no fact here either."""
    made = loaded({"uniform": (*FASTER, ()), "zipf:1": (*SAME, ()), "zipf:2": (*SLOWER, ())})
    expected = (
        "bf16 against fp32: the load decides: faster with load=uniform (2.00x [1.98, 2.02]); as fast with load=zipf:1 "
        "(0.990x [0.980, 1.00]); slower with load=zipf:2 (0.800x [0.792, 0.808])"
    )
    assert over(made) == [expected]
    for shown in (render(*made, 200), render_whole(*made, 200)):
        words = " ".join(shown.split())
        assert expected in words and words.index(expected) < words.index(
            "0.990x", words.index(expected) + len(expected)
        )
    items = of_kind(part("verdict", made), Items)[0].items
    assert items[0] == Text(f"{expected}.", Tone.STRONG)
    doubted = loaded({"uniform": (*FASTER, (NOISY,)), "zipf:1": (*SLOWER, ())})
    assert "the load may decide: perhaps faster with load=uniform" in over(doubted)[0]


def test_a_sign_that_does_not_turn_and_an_emulation_decide_nothing() -> None:
    assert over(loaded({"uniform": (*FASTER, ()), "zipf:1": (*SAME, ())})) == []
    assert over(loaded({"uniform": (*FASTER, ())})) == []
    assert over(shapes(SIDES, {**SIDES, "m": 512})) == []
    run, findings = loaded({"uniform": (*FASTER, ()), "zipf:1": (*SLOWER, ())})
    emulated = tuple(replace(one, support=EMULATED) for one in run.records)
    assert over((replace(run, records=emulated), findings)) == []
