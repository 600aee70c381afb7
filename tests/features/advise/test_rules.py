"""The checklist's rules on runs made by hand, whose answers are known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fp8bench.analysis.findings import findings
from fp8bench.features.advise.decide import predicted
from fp8bench.features.advise.shape_rules import pays_from
from fp8bench.features.advise.values import Met
from fp8bench.features.sensitivity.study import By, LayerTrial, Study
from fp8bench.model import (
    Finding,
    Level,
    MemoryUse,
    OperatorCount,
    PhaseCount,
    Record,
    Run,
    Share,
    ShareKind,
    Shares,
    Tape,
)
from fp8bench.model.step import Coverage, HeldProduct, Holder
from tests.advised import BF16, FP8, NANO, answer, basis, group, record, run, said
from tests.counts import for_each


def met(rule: str, *groups: list[Record], mode: str = "fp8", **more: object) -> Met:
    return answer(said(*groups, **more), rule, mode).met


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
    found = answer(said(group(bf16=small, fp8={**small, "cast": 50, "gemm": 500})), "amdahl")
    assert found.met is Met.NO and found.figure == "10% of the step: 1.05x with products 2.00x as fast, as here"


def test_stages_gain_or_not() -> None:
    found = answer(said(*STAGES), "stages")
    assert found.met is Met.NO and "training 1.3" in found.figure and "forward 0.9" in found.figure


def test_a_model_as_it_came_has_shares_in_place_of_phases() -> None:
    """Products are 60% of 10 ms there, and 40% of 7.5 ms with casts of 10%: an estimate, which bounds nothing."""
    looked = [Shares(tuple(Share(kind, "", False, seconds, 1) for kind, seconds in parts), 1.0) for parts in (
        ((ShareKind.GEMM, 0.6),), ((ShareKind.GEMM, 0.4), (ShareKind.CAST, 0.1)))]  # fmt: skip
    lead, case = group(bf16={"unattributed": 10_000}, fp8={"unattributed": 7500})
    records = [replace(lead, shares=looked[0]), replace(case, shares=looked[1])]
    found = said(records)
    amdahl, casts = answer(found, "amdahl"), answer(found, "casts")
    assert (amdahl.met, amdahl.figure) == (
        Met.YES, "60% of the step: 1.43x with products 2.00x as fast, as here, estimated from shares of the step"
    )  # fmt: skip
    assert casts.met is Met.YES and casts.figure.startswith("products 2.00x, with casts 1.60x, estimated")
    unlooked = said([lead, case])
    assert "--shares tells them" in answer(unlooked, "amdahl").figure and answer(unlooked, "casts").met is Met.UNKNOWN
    (pair,) = basis(records).besides
    assert predicted(pair) == predicted(basis([lead, case]).besides[0])


def test_the_cheapest_scaling_of_its_width() -> None:
    """By what was timed beside it; one of four bits is no rival of one of eight."""
    found = said(group(fp8=FP8, fp8_rowwise={**FP8, "cast": 1500}, nvfp4={**FP8, "gemm": 2000}))
    assert answer(found, "granularity").met is Met.YES
    slower = answer(found, "granularity", "fp8-rowwise")
    assert slower.met is Met.NO and "of fp8's speed" in slower.figure
    assert answer(found, "granularity", "nvfp4").met is Met.UNKNOWN


def test_compiling_is_looked_at_where_it_is_an_axis() -> None:
    eager, compiled = ({**NANO, "compile": word} for word in ("no", "yes"))
    slow = group(eager, fp8={**FP8, "cast": 5000})
    fast = group(compiled, bf16={"unattributed": 9000}, fp8={"unattributed": 7000})
    found = answer(said(slow, fast), "compile")
    assert found.met is Met.YES and found.figure.startswith("compiled 1.29x") and "without 0.83" in found.figure
    assert met("compile", slow) is Met.UNKNOWN


def test_a_larger_batch_may_gain_more() -> None:
    found = said(group({**NANO, "batch": 1}, fp8={**FP8, "cast": 2500}), group({**NANO, "batch": 8}, fp8=FP8))
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


def lent(*groups: list[Record]) -> tuple[tuple[Run, Mapping[str, Finding]], ...]:
    """Another run of this machine, whose figures answer questions; the advice is on the first one alone."""
    other = run(*groups)
    return ((other, findings(other)),)


@for_each(("side", "wanted"), [(512, Met.NO), (2048, Met.YES), (16384, Met.UNKNOWN)])
def test_products_of_a_step_against_break_even(side: int, wanted: Met) -> None:
    assert met("shapes", model(side), *squares(0.5, 0.8, 1.4, 1.9), mode="nvfp4") is wanted
    found = said(model(side), other_runs=lent(*squares(0.5, 0.8, 1.4, 1.9)))
    assert answer(found, "shapes", "nvfp4").met is wanted
    assert {each.setting for each in found.answers} == {model(side)[0].case.setting}
    alone = answer(said(model(side)), "shapes", "nvfp4")
    assert alone.met is Met.UNKNOWN and alone.measure.startswith("fp8bench suite gemm --dtypes bf16,nvfp4, then")


def test_what_would_measure_a_profile_is_a_profile() -> None:
    """Forward and training have other optimizers, and are the same model all the same."""
    make = {"make": "my_pkg:make", "pass": "training", "optimizer": "adamw", "compile": "no"}
    forward = {**make, "pass": "forward", "optimizer": "none"}
    training = group(make, workload="model", fp8=FP8)
    measures = {each.rule: each.measure for each in said(training).answers if each.met is Met.UNKNOWN}
    assert measures["compile"] == "fp8bench profile my_pkg:make --dtypes fp8 --compile"
    assert measures["layers"] == "fp8bench sensitivity my_pkg:make --dtype fp8"
    assert measures["learns"] == "fp8bench train --dtypes bf16,fp8 --seeds 5" and "stages" in measures
    assert (
        met("stages", training, other_runs=lent(group(forward, workload="model", fp8={**FP8, "cast": 4000}))) is Met.NO
    )
    alone = answer(said(group(forward, workload="model", fp8=FP8)), "compile").measure
    assert alone == "fp8bench profile my_pkg:make --forward --dtypes fp8 --compile"


def holder(name: str, kind: str, flops: int, converted: bool = True, side: int = 4096) -> Holder:
    products = (HeldProduct(side, side, side),)
    return Holder(name, kind, (8, 8), products, flops, 1, converted, "" if converted else "no product of ours for it")


def test_coverage_and_experts() -> None:
    """Of a mixture of experts of which linear layers alone are converted."""
    coverage = Coverage((holder("attn", "linear", 18), holder("mlp", "experts", 73, False), holder("head", "head", 9)),
                        flops=100)  # fmt: skip
    found = said([record("bf16", BF16, reference=True), record("fp8", FP8, coverage=coverage)])
    covered, experts = answer(found, "coverage"), answer(found, "experts")
    assert covered.met is Met.NO and "mlp is not: no product" in covered.figure
    assert experts.met is Met.NO and experts.figure == "experts are 73% of product FLOPs, 0% of them converted"
    assert not {"coverage", "experts", "compile"} & {each.rule for each in said(group(fp8=FP8)).answers}


def test_training_in_fp8_saves_no_memory_and_the_copies_are_named() -> None:
    before = MemoryUse(1000 << 20, (("weights", 400 << 20), ("optimizer", 600 << 20)))
    after = MemoryUse(1010 << 20, (*before.roles, ("low_precision_weights", 10 << 20)))
    lead = record("bf16", BF16, reference=True, memory=before)
    found = answer(said([lead, record("fp8", FP8, memory=after)]), "memory")
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
        bears = next(each for each in said(mapped, studies=(study(*gaps),)).answers if each.rule == "layers")
        assert bears.met is Met.YES and bears.figure.startswith("layers low: 1, loss +0.5%")
    unit = said(group(fp8_unit=FP8), studies=(study(*gaps),)).answers
    assert unit and not [each for each in unit if each.rule == "layers"], "no layer of it can stand in another model"
    other = replace(study(*gaps), params=(("size", "nano"),))
    assert met("layers", group(fp8=FP8), studies=(other,)) is Met.UNKNOWN
