"""Which sentences are confirmed, refuted or left open, which rows are refused, and what `claim check` finds."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from fp8bench.analysis.findings import findings
from fp8bench.cli.progress import SILENT
from fp8bench.errors import UsageError
from fp8bench.features.claim.command import parse_claim_run_requests
from fp8bench.features.claim.decide import answer_claim_from_run, decide_claim_answer
from fp8bench.features.claim.expressions import evaluate_expression
from fp8bench.features.claim.folder import check_folder, load_stored_run, write_folder
from fp8bench.features.claim.readings import read_claim_figure
from fp8bench.features.claim.rows import load_bundled_claims, load_claims_file, parse_claims
from fp8bench.features.claim.runs import ClaimRunSource, find_stored_run, is_claim_for_device, is_run_reusable
from fp8bench.features.claim.values import (
    AnswerCheckOutcome,
    CannotDecide,
    Claim,
    ClaimAnswer,
    ClaimKind,
    ClaimOutcome,
    FigureReading,
)
from fp8bench.features.claim.view import render_answers
from fp8bench.features.train.values import TrainingObserver
from fp8bench.files import add_checksum, remove_checksum
from fp8bench.model import Case, Environment, Label, Level, Request, Run, Status
from fp8bench.plan.make import make_plan
from fp8bench.report.page.markdown import render
from fp8bench.store.runs.run_file import load_run
from tests.commands import ROOT, Say, only_sentence, unfolding
from tests.counts import for_each
from tests.facts import A100, B200, H200

EVIDENCE = ROOT / "reports" / "claims_cpu"
GEMM = next((ROOT / "tests" / "golden" / "stores" / "runs" / "runs").glob("*/*-8b215bef.jsonl"))
ROW = """
[[claim]]
id = "x"
sentence = "FP8 rounds"
source = {title = "t", publisher = "p", year = 2024, address = "https://example.org"}
kind = "measured"
run = "suite gemm --quick"
case = {mode = "fp8"}
figure = "product_error"
relation = "<"
bound = 0.05
device = "any"
"""


def changed(**values: str) -> str:
    """The row with changed lines; None removes a line."""
    lines = []
    for line in ROW.strip().splitlines():
        key = line.partition(" ")[0]
        lines.append(f"{key} = {values.pop(key)}" if key in values else line)
    return "\n".join(
        [*(line for line in lines if not line.endswith(" = -")), *(f"{k} = {v}" for k, v in values.items())]
    )


def claim_of(**values: str) -> Claim:
    return parse_claims("claims", changed(**values)).claims["x"]


def claim_on(mode: str = "bf16", **changes: object) -> Claim:
    """A claim on a mode of the stored run, whose products have 64 columns."""
    return replace(claim_of(), case=(("mode", mode), ("n", "64")), **changes)  # type: ignore[arg-type]


@pytest.fixture
def say(store: Path, fp8bench: Say) -> Say:
    return unfolding(fp8bench, "claim")


@pytest.fixture(scope="module")
def gemm() -> Run:
    return load_run(GEMM)


# Arithmetic, compared with numbers written by hand.
@for_each(
    ("text", "value"),
    [
        ("e4m3.largest", 1.75 * 256),
        ("log2(e5m2.largest)", 15 + math.log2(1.75)),
        ("-e4m3.smallest_subnormal", -1 / 512),
        ("e2m1.bits + e8m0.bits / 32", 4.25),
        ("h200_sxm.tf32 / 1e12", 494.5),
        ("h100_sxm.sparse_fp8 - 2 * h100_sxm.fp8", 0),
        ("2 ** (3 - 1) * sqrt(4)", 8),
    ],
)
def test_expressions_are_computed(text: str, value: float) -> None:
    assert evaluate_expression(text).value == value


@for_each(
    ("text", "said"),
    [
        ("__import__('os').system('true')", "is not arithmetic"),
        ("[1][0]", "is not arithmetic"),
        ("True", "is not arithmetic"),
        ("e4m3.__class__", "unknown fact of e4m3fn"),
        ("h300.fp8", "Did you mean 'b300'"),
        ("exec(1)", "unknown function 'exec'"),
        ("9 ** 9 ** 9", "has no value"),
        ("1 / 0", "has no value"),
        ("1e999", "gives infinity or NaN"),
        ("1 +", "is not arithmetic"),
        ("1+" * 200 + "1", "at most 200 characters"),
    ],
)
def test_what_is_no_arithmetic_is_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        evaluate_expression(text)


@for_each(
    ("relation", "bound", "tolerance", "values", "sides"),
    [
        ("=", (2.0,), 0.1, (1.79, 1.8, 2.0, 2.2, 2.21), [-1, 0, 0, 0, 1]),
        ("between", (3.0, 4.0), 0.0, (2.9, 3.0, 4.0, 4.1), [-1, 0, 0, 1]),
        ("<", (2.0,), 0.0, (1.9, 2.0), [0, 1]),
        ("<=", (2.0,), 0.0, (2.0, 2.1), [0, 1]),
        (">", (2.0,), 0.0, (2.0, 2.1), [-1, 0]),
        (">=", (-2.0,), 0.0, (-2.1, -2.0), [-1, 0]),
        ("=", (-2.0,), 0.1, (-2.3, -2.2, -1.8, -1.7), [-1, 0, 0, 1]),
    ],
)
def test_bounds_hold_for_these_values(
    relation: str, bound: tuple[float, ...], tolerance: float, values: tuple[float, ...], sides: list[int]
) -> None:
    claim = replace(claim_of(), relation=relation, bound=bound, tolerance=tolerance)
    assert list(map(claim.find_side, values)) == sides


@for_each(
    ("values", "said"),
    [
        ({"figure": '"product_eror"'}, "unknown figure of a run"),
        ({"run": '"train --quick"', "figure": '"gaps"', "case": '{arm = "fp8"}'}, "Did you mean 'gap'"),
        ({"run": '"train --quick"'}, "`case` has no arm"),
        ({"device": "-"}, "`device` is missing"),
        ({"sentence": '"FP8 keeps the accuracy"'}, "'accuracy' promises more than product_error measures"),
        ({"sentence": '"FP8 training is exact"'}, "which does not train"),
        ({"sentence": '"FP8 halves memory"'}, "measure `device_peak_memory ratio`"),
        ({"figure": '"speedup"'}, 'device = "any" names none'),
        ({"relation": '"="', "tolerance": "0.001"}, "a resolution of 1%, which cannot decide a tolerance of 0.1%"),
        ({"figure": '"speedup"', "device": '"cuda"', "bound": "1.001"}, "cannot distinguish 1.001 from 1"),
        ({"figure": '"speedup"', "device": '"cuda"', "limit": '"2"'}, "two lower bounds on time bound no ratio"),
        ({"kind": '"arithmetic"', "sentence": '"FP8 is 2x faster"'}, "arithmetic cannot bound a ratio of two times"),
        ({"kind": '"arithmetic"', "sentence": '"FP8 takes half the time of BF16"'}, "'time' is about times"),
        ({"kind": '"arithmetic"', "sentence": '"At its peak FP8 is twice as fast"'}, "'fast' is about times"),
        ({"limit": '"h200_sxm.bf16"'}, "only a time or a rate has a limit"),
        (
            {"figure": '"time"', "limit": '"1 / h200_sxm.bf16"', "device": '"cuda"'},
            "refutes nothing on another card",
        ),
        ({"figure": '"time"', "limit": '"1"', "device": '"H200 SXM"'}, "`limit` comes from one datasheet"),
        ({"case": '{n = "64"}'}, "`case` has no mode"),
        ({"case": "-"}, "`case` has no mode"),
        ({"card": '"H200"'}, "`card` is a condition of a published measurement"),
        ({"power": "-700", "published": "true"}, "both above 0"),
        ({"sum": "true"}, "a sum of product_error over cases has no meaning"),
        ({"source": '"blog"'}, "unknown source 'blog'"),
        ({"bound": "1" + 400 * "0"}, "docs/claims.md lists the values of each key"),
        ({"bound": "2024-01-01"}, "docs/claims.md lists the values of each key"),
        ({"bound": 2000 * "["}, "is not TOML"),
        ({"id": '["x"]'}, "docs/claims.md lists the values of each key"),
        ({"kind": '"guess"'}, "is not one of arithmetic, measured, all of"),
        ({"relation": '"~"'}, "relation '~' is not one of"),
        ({"relation": '"between"'}, "two numbers, the lower one first"),
        ({"bound": "nan"}, "takes one number"),
        ({"bound": '"much"'}, "docs/claims.md lists the values of each key"),
        ({"tolerance": "0.1"}, "For other relations, move the bound"),
        ({"source": '{title = "a blog"}'}, "title, publisher, year and address"),
        ({"sentense": '"FP8"'}, "Did you mean 'sentence'"),
        ({"run": '"suite gem"'}, "Did you mean 'gemm'"),
        ({"run": '"suite gemm --devices cpu"'}, "`run` cannot have --devices"),
        ({"run": '"suite gemm --import evil.py"'}, "`run` cannot have --import"),
        ({"run": '"suite evil.py"'}, "`run` cannot have evil.py"),
        ({"run": '"doctor"'}, "must start with suite or train"),
        ({"kind": '"all of"', "parts": '["y"]'}, "the part 'y' is not a measured or arithmetic claim"),
    ],
)
def test_bad_rows_are_refused_in_a_sentence(say: Say, values: dict[str, str], said: str) -> None:
    Path("row.toml").write_text(changed(**values))
    code, out, err = say("row.toml", "--cpu")
    assert (code, out) == (2, "") and said in only_sentence(err), err


def test_bad_files_and_names_are_refused(say: Say) -> None:
    Path("broken.toml").write_text("[[claim")
    Path("empty.toml").write_text("")
    Path("twice.toml").write_text(ROW + ROW)
    for words, said in (
        ("broken.toml", "is not TOML"),
        ("empty.toml", "has no claims"),
        ("twice.toml", "two claims with the id x"),
        ("none.toml", "cannot be read"),
        ("tf32-312-h20", "Did you mean 'tf32-312-h200'"),
        ("check", "takes one folder"),
        ("--all fp8-2x", "Omit the names"),
    ):
        code, _, err = say(*words.split())
        assert code == 2 and said in only_sentence(err), (words, err)
    code, _, err = say("FP8 is 9x faster than BF16")  # never an answer to a similar sentence
    assert code == 2 and "does not have the sentence" in err and "fp8-2x: FP8 is 2x faster" in err


@for_each(
    ("sentence", "code", "answer", "said"),
    [
        ("TF32 has 312 TFLOPS on an H200", 1, "refuted", "494.5 TFLOP/s"),
        ("E4M3 reaches 448", 0, "confirmed", "448"),
        ("FP8 is 2x faster", 4, "cannot tell here", "`fp8bench claim fp8-2x --device cuda` on one of H100, H200, B200"),
        ("fp8-bits", 0, "confirmed", "all 4 parts are confirmed"),
        ("fp8-peak-6x-fp32", 1, "refuted", "29.54 x"),
    ],
)
def test_sentences_are_answered(say: Say, sentence: str, code: int, answer: str, said: str) -> None:
    ended, out, _ = say(sentence, "--cpu")
    assert ended == code and f"answer: {answer}" in out and said in " ".join(out.split()), out


def test_a_rate_above_the_peak_is_refuted_without_a_run() -> None:
    def no_run(_: Claim) -> Run:
        raise AssertionError

    values = {"sentence": '"BF16 products"', "figure": '"flops_per_second"', "limit": '"h200_sxm.bf16"'}
    claim = claim_of(**values, device='"H200 SXM"', relation='">="', bound="1200e12")
    assert decide_claim_answer(claim, {}, no_run).answer is ClaimOutcome.REFUTED
    with pytest.raises(AssertionError):  # a rate below the peak needs a run
        decide_claim_answer(replace(claim, bound=(900e12,)), {}, no_run)
    least = claim_of(
        sentence='"BF16 products"', figure='"time"', limit='"2 * 8192 ** 3 / h200_sxm.bf16"', device='"H200 SXM"'
    )
    assert decide_claim_answer(replace(least, bound=(1e-3,)), {}, no_run).answer is ClaimOutcome.REFUTED
    with pytest.raises(AssertionError):
        decide_claim_answer(replace(least, bound=(2e-3,)), {}, no_run)


# Figures of runs.


@for_each(
    ("figure", "column"),
    [("product_error", "median_in_unit"), ("time", "best_in_unit"), ("peak_memory", "median_in_unit")],
)
def test_figures_are_those_of_the_csv(gemm: Run, fp8bench: Say, figure: str, column: str) -> None:
    code, out, _ = fp8bench("show", str(GEMM), "--csv", "-")
    wanted = {"mode": "bf16", "param_n": "64", "phase": "step", "metric": figure}
    (row,) = (row for row in csv.DictReader(io.StringIO(out)) if wanted.items() <= row.items())
    assert code == 0 and read_claim_figure(claim_on(figure=figure), gemm).value == float(row[column])


def test_ratios_are_over_the_reference(gemm: Run) -> None:
    bf16, fp32 = (read_claim_figure(claim_on(mode, figure="peak_memory"), gemm).value for mode in ("bf16", "fp32"))
    ratio = read_claim_figure(claim_on(figure="peak_memory ratio"), gemm)
    assert ratio.value == bf16 / fp32 == ratio.low == ratio.high


@for_each(
    ("figure", "mode", "said"),
    [
        ("time", "fp8", "fp8 is emulated on this device, so its time is that of the emulation"),
        ("speedup", "fp8", "so its time is that of the emulation"),
        ("peak_memory ratio", "nvfp4", "so its peak_memory is that of the emulation"),
        ("speedup", "bf16", "too few rounds"),
    ],
)
def test_costs_of_an_emulation_and_quick_runs_decide_no_speed(gemm: Run, figure: str, mode: str, said: str) -> None:
    answered = answer_claim_from_run(claim_on(mode, figure=figure), gemm)
    assert answered.answer is ClaimOutcome.CANNOT_TELL and said in answered.why
    if mode == "bf16":
        assert answered.value is not None
        listed = " ".join(render(render_answers([answered, answered], "mine.toml")).split())
        assert f"{answered.value:.4g}; too few rounds for an interval: they gave" in listed
        assert "fp8bench claim mine.toml x" in listed


def test_noise_widens_times_and_hard_labels_withhold_them(gemm: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    judged = findings(gemm)
    (name,) = (
        record.case.id for record in gemm.records if record.case.mode == "bf16" and ("n", 64) in record.case.params
    )

    def read(**values: object) -> FigureReading:
        changed_finding = {name: replace(judged[name], **values)}  # type: ignore[arg-type]
        monkeypatch.setattr("fp8bench.features.claim.readings.findings", lambda _: {**judged, **changed_finding})
        return read_claim_figure(claim_on(figure="time"), gemm)

    calm = read(spread=0.0, hard=())
    noisy = read(spread=0.5, hard=())
    assert calm.value and (calm.low, calm.high) == (0.99 * calm.value, 1.01 * calm.value)
    assert (noisy.low, noisy.high) == (0.5 * calm.value, 1.5 * calm.value)
    with pytest.raises(CannotDecide, match=r"could not be timed reliably \(throttled\)"):
        read(hard=(Label.THROTTLED,))


def test_a_remedy_is_named_where_a_command_helps(gemm: Run) -> None:
    failed = [replace(record, status=Status.FAILED, reason="no emulated product") for record in gemm.records]
    for run, claim, remedy in (
        (gemm, claim_on(figure="speedup"), "`fp8bench suite gemm`: remove --quick from `run` in the row"),
        (gemm, claim_on("fp8", figure="time"), "`fp8bench suite gemm --quick` on a device that has the format"),
        (replace(gemm, records=tuple(failed)), claim_on(figure="time"), ""),
        (gemm, claim_on(figure="time ratio", sentence="BF16 is faster than FP16"), ""),
    ):
        answered = answer_claim_from_run(claim, run)
        assert answered.answer is ClaimOutcome.CANNOT_TELL and answered.remedy.startswith(remedy)
        assert bool(answered.remedy) is bool(remedy)


def test_a_case_has_to_be_one(gemm: Run) -> None:
    with pytest.raises(UsageError, match="2 cases of the run 8b215bef match"):
        read_claim_figure(claim_of(), gemm)
    with pytest.raises(UsageError, match="0 cases"):
        read_claim_figure(claim_of(case='{mode = "fp7"}'), gemm)


def test_another_baseline_than_that_of_the_sentence_decides_nothing(gemm: Run) -> None:
    mismatch = "the sentence compares with FP16, but the reference of the run is fp32"
    for baseline, answer, why in (
        ("FP16", ClaimOutcome.CANNOT_TELL, mismatch),
        ("FP32", ClaimOutcome.CONFIRMED, ""),
        ("expected", ClaimOutcome.CONFIRMED, ""),
    ):
        claim = claim_on(figure="peak_memory ratio", bound=(9.0,), sentence=f"BF16 takes less than {baseline}")
        answered = answer_claim_from_run(claim, gemm)
        assert (answered.answer, answered.why) == (answer, why)


def test_one_refuted_part_refutes_and_an_undecided_one_leaves_a_conjunction_open(gemm: Run) -> None:
    error = claim_on("fp8")
    claims = {
        "true": replace(error, id="true"),
        "false": replace(error, id="false", bound=(0.01,)),
        "open": replace(error, id="open", figure="time"),
    }
    for parts, answer in (
        (("true",), ClaimOutcome.CONFIRMED),
        (("true", "open"), ClaimOutcome.CANNOT_TELL),
        (("open", "true", "false"), ClaimOutcome.REFUTED),
    ):
        conjunction = replace(error, id="all", kind=ClaimKind.ALL_OF, parts=parts)
        assert decide_claim_answer(conjunction, claims, lambda _: gemm).answer is answer


def test_an_interval_over_the_bound_decides_nothing(gemm: Run) -> None:
    value = read_claim_figure(claim_on("fp8"), gemm).value
    answers = [
        answer_claim_from_run(claim_on("fp8", bound=(value * share,)), gemm).answer for share in (0.98, 1.0, 1.02)
    ]
    assert answers == [ClaimOutcome.REFUTED, ClaimOutcome.CANNOT_TELL, ClaimOutcome.CONFIRMED]


def test_published_figures_are_compared_with_their_conditions(gemm: Run) -> None:
    claim = claim_on("fp8", relation="=", tolerance=0.05, published=True)
    value = read_claim_figure(claim, gemm).value
    device = replace(gemm.devices[0], name="NVIDIA H200", kind="cuda")
    records = tuple(replace(record, case=replace(record.case, device=device.key)) for record in gemm.records)
    environment = Environment({f"{device.key} power_cap": 500.0})
    run = replace(gemm, devices=(device,), records=records, environment=environment)

    def compare(bound: float, card: str = "H200", power: float | None = 500, run: Run = run) -> ClaimAnswer:
        return answer_claim_from_run(replace(claim, bound=(bound,), card=card, power=power), run)

    assert [compare(value * share).answer for share in (1.0, 0.9, 1.1)] == [
        ClaimOutcome.WITHIN_RANGE,
        ClaimOutcome.ABOVE_RANGE,
        ClaimOutcome.BELOW_RANGE,
    ]
    other = compare(2 * value, "H100")
    assert other.answer is ClaimOutcome.OTHER_CONDITIONS and "card H200 SXM, published H100" in other.why
    shown = " ".join(render(render_answers([other, other])).split())
    assert "; published " in shown and "card H200 SXM, published H100; torch" in shown  # never a bare number
    assert "power limit 500 W, published 700 W" in compare(2 * value, power=700).why
    # A power limit that one side does not know may be another.
    unpublished = compare(2 * value, power=None)
    unmeasured = compare(2 * value, run=replace(run, environment=Environment({})))
    assert unpublished.answer is unmeasured.answer is ClaimOutcome.OTHER_CONDITIONS
    assert "power limit 500 W, published unknown" in unpublished.why
    assert "power limit unknown, published 500 W" in unmeasured.why
    assert "the source names no card" in compare(value, card="").why  # named even where the figures agree


# Which runs count.


def source_for(store: Path, question: Request, device: str = "cpu") -> ClaimRunSource:
    return ClaimRunSource(store, {"suite gemm --quick": question}, device, SILENT, TrainingObserver)  # type: ignore[arg-type]


def test_a_stored_run_of_this_week_is_reused(gemm: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = Environment({name: gemm.environment.get(name) for name in ("machine", "fp8bench", "torch")})
    monkeypatch.setattr("fp8bench.features.claim.runs.platform.node", lambda: here.get("machine"))
    monkeypatch.setattr("fp8bench.features.claim.runs.version", lambda _: here.get("torch"))
    now = datetime.now(UTC)
    assert is_run_reusable(here, (now - timedelta(days=6)).isoformat())
    assert not is_run_reusable(here, (now - timedelta(days=8)).isoformat())
    for name in ("machine", "fp8bench", "torch"):
        assert not is_run_reusable(here.also({name: "another"}), now.isoformat())
    monkeypatch.setattr("fp8bench.features.claim.runs._MAX_RUN_AGE", timedelta.max)
    path = tmp_path / "runs" / "box" / GEMM.name
    path.parent.mkdir(parents=True)
    shutil.copy(GEMM, path)
    source = source_for(tmp_path, replace(gemm.request, devices=()))
    question = replace(gemm.request, devices=("cpu",))
    assert find_stored_run(question, tmp_path) == (None, None)  # the stored request names no device
    monkeypatch.setattr("fp8bench.features.claim.runs.replace", lambda value, **_: value)
    assert source(claim_of()).path == str(path)
    lines = GEMM.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]))  # interrupted: resumed, not used
    found, unfinished = find_stored_run(gemm.request, tmp_path)
    assert found is None and unfinished is not None


@pytest.mark.slow
def test_what_is_missing_is_measured_once_and_resumed(say: Say) -> None:
    words = "suite gemm --quick --no-isolation --no-energy --set shape=16 --dtypes fp32,bf16,fp8"
    Path("row.toml").write_text(changed(run=f'"{words}"', bound="0.2"))
    code, out, err = say("row.toml", "--cpu", "--keep", "evidence")
    assert (
        code == 0
        and "answer: confirmed" in out
        and "measures 1 run, up to 22 s on an idle machine, and reuses 0" in err
    )
    (run,) = Path(".fp8bench/runs").glob("*/*.jsonl")
    assert f"runs: {run.stem.rpartition('-')[2]}" in out
    assert say("check", "evidence")[0] == 0
    code, again, err = say("row.toml", "--cpu")
    assert (code, again, err) == (0, out, "")
    lines = run.read_bytes().splitlines(keepends=True)
    run.write_bytes(b"".join(lines[:1]))  # as after a kill
    code, again, err = say("row.toml", "--cpu")
    assert code == 0 and "measures 1 run" in err and again.splitlines()[-2:] == out.splitlines()[-2:]
    assert [*Path(".fp8bench/runs").glob("*/*.jsonl")] == [run]


def test_cards_are_found_by_the_words_of_their_names() -> None:
    claim = replace(claim_of(), device=("H200", "H100 SXM"))
    names = ("NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA A100-SXM4-80GB", "Intel Xeon")
    assert [is_claim_for_device(claim, name) for name in names] == [True, True, False, False, False]


# The catalogue and the committed answers.


def test_every_row_of_the_catalogue_can_be_decided() -> None:
    file = load_bundled_claims()
    parse_claim_run_requests(file)
    assert len(file.claims) >= 40
    for claim in file.claims.values():
        address = claim.source.address
        assert address.startswith("https://") or (ROOT / address).is_file(), claim.id


def test_rows_for_gpus_plan_one_native_case_there() -> None:
    """Rows for GPUs that no machine here has are at least planned, with the baseline of their sentence."""
    file = load_bundled_claims()
    facts = {"H200": H200, "A100": A100, "B200": B200}
    questions = parse_claim_run_requests(file)
    rows = [claim for claim in file.claims.values() if claim.run and "any" not in claim.device]
    assert len(rows) >= 12
    for claim in rows:
        device = facts["H200" if {"cuda", "H200"} & {*claim.device} else claim.device[0]]
        question = questions[claim.run]
        assert isinstance(question, Request)
        plan = make_plan(replace(question, devices=("cuda",)), (device,), "text")
        planned = [case for group in plan for case in group.cases]
        chosen = [case for case in planned if read_facts(case.case).items() >= dict(claim.case).items()]
        assert chosen and (claim.sum or len(chosen) == 1), claim.id
        assert all(case.runs and not case.support.is_emulated for case in chosen), claim.id
        (reference,) = {group.cases[group.reference].case.mode for group in plan}
        assert not claim.is_ratio or reference.upper() in claim.sentence, claim.id


def read_facts(case: Case) -> dict[str, str]:
    return {"mode": case.mode, **{name: str(value) for name, value in case.params}}


@pytest.fixture
def evidence(tmp_path: Path) -> Path:
    """A folder of four answers from committed runs."""
    file = load_bundled_claims()
    kept = {}
    for name in ("nvfp4-finer", "e4m3-error", "fp8-half-wire"):
        kept[name] = load_stored_run(run_of(EVIDENCE, name))
    claims = [file.claims[name] for name in (*kept, "tf32-312-h200")]
    answers = [decide_claim_answer(claim, file.claims, lambda claim: kept[claim.id]) for claim in claims]
    write_folder(tmp_path / "evidence", file, answers, kept)
    assert {standing for standing, _ in standings(tmp_path / "evidence").values()} == {AnswerCheckOutcome.ANSWER_HOLDS}
    return tmp_path / "evidence"


def standings(folder: Path) -> dict[str, tuple[AnswerCheckOutcome, str]]:
    return {checked.id: (checked.standing, checked.why) for checked in check_folder(folder, parse_claim_run_requests)}


def test_the_committed_answers_follow_from_the_committed_runs() -> None:
    checked = standings(EVIDENCE)
    answers = json.loads((EVIDENCE / "answers.json").read_text())["answers"]
    open_ids = {answer["id"] for answer in answers if answer["answer"] == ClaimOutcome.CANNOT_TELL}
    assert len(checked) >= 40 and {*checked} - open_ids
    for name, (standing, why) in checked.items():
        assert standing is (AnswerCheckOutcome.CANNOT_JUDGE if name in open_ids else AnswerCheckOutcome.ANSWER_HOLDS), (
            name,
            why,
        )
    assert load_claims_file(EVIDENCE / "claims.toml").claims == load_bundled_claims().claims


def run_of(folder: Path, claim: str) -> Path:
    runs = json.loads((folder / "answers.json").read_text())["runs_by_claim"]
    return folder / "runs" / f"{runs[claim]}.jsonl"


def test_flipped_bytes_are_named(evidence: Path) -> None:
    path = run_of(evidence, "nvfp4-finer")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    checked = standings(evidence)
    assert checked["nvfp4-finer"][0] is AnswerCheckOutcome.ANSWER_FAILS and "line " in checked["nvfp4-finer"][1]
    assert checked["e4m3-error"][0] is AnswerCheckOutcome.ANSWER_HOLDS


def test_dropped_rows_and_missing_runs_are_named(evidence: Path) -> None:
    path = run_of(evidence, "nvfp4-finer")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2] + lines[3:]))
    run_of(evidence, "fp8-half-wire").unlink()
    checked = standings(evidence)
    assert checked["nvfp4-finer"][0] is AnswerCheckOutcome.ANSWER_FAILS and "line" in checked["nvfp4-finer"][1]
    assert checked["fp8-half-wire"] == (
        AnswerCheckOutcome.CANNOT_JUDGE,
        f"the run {run_of(evidence, 'fp8-half-wire').stem} is not in the folder",
    )


def test_edited_bounds_and_answers_are_named(evidence: Path, say: Say) -> None:
    file = evidence / "claims.toml"
    file.write_text(file.read_text().replace("bound = 312\n", "bound = 494.5\n", 1))
    standing, why = standings(evidence)["tf32-312-h200"]
    assert (
        standing is AnswerCheckOutcome.ANSWER_FAILS
        and why == "bound is [494.5] in claims.toml, but was [312.0] when answered"
    )
    code, out, _ = say("check", str(evidence))
    assert code == 1 and "tf32-312-h200" in out and "3 of 4 stored answers hold" in " ".join(out.split())
    answers = evidence / "answers.json"
    answers.write_text(answers.read_text().replace('"refuted"', '"confirmed"', 1))
    code, _, err = say("check", str(evidence))
    assert code == 2 and "the answers were edited, or the file is damaged" in err


def test_swapped_runs_are_named(evidence: Path) -> None:
    first = run_of(evidence, "nvfp4-finer")
    second = run_of(evidence, "e4m3-error")
    kept = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(kept)
    checked = standings(evidence)
    for name, run in (("nvfp4-finer", second.stem), ("e4m3-error", first.stem)):
        assert (
            checked[name][0] is AnswerCheckOutcome.ANSWER_FAILS
            and f"it holds the run {run}, so runs were exchanged" in checked[name][1]
        )


def test_an_emulated_run_of_another_level_changes_the_answer() -> None:
    """The same figures from a native device are accepted."""
    run = load_stored_run(run_of(EVIDENCE, "bf16-halves-memory"))
    assert isinstance(run, Run)
    claim = replace(load_bundled_claims().claims["bf16-halves-memory"], case=(("mode", "fp8"),))
    assert answer_claim_from_run(claim, run).answer is ClaimOutcome.CANNOT_TELL
    records = [replace(record, support=replace(record.support, level=Level.NATIVE)) for record in run.records]
    assert answer_claim_from_run(claim, replace(run, records=tuple(records))).answer is ClaimOutcome.REFUTED


# A folder from somebody else.


def test_edited_parts_of_a_conjunction_are_named(tmp_path: Path) -> None:
    file = load_bundled_claims()
    answers = [decide_claim_answer(file.claims["fp8-bits"], file.claims, no_run)]
    write_folder(tmp_path / "bits", file, answers, {})
    path = tmp_path / "bits" / "claims.toml"
    head, name, rest = path.read_text().partition('id = "e5m2-mantissa"')
    path.write_text(head + name + rest.replace('"="', '"<="', 1))
    assert standings(tmp_path / "bits")["fp8-bits"] == (
        AnswerCheckOutcome.ANSWER_FAILS,
        "its part e5m2-mantissa: relation is <= in claims.toml, but was = when answered",
    )


def no_run(_: Claim) -> Run:
    raise AssertionError


def copy_of(folder: Path) -> Path:
    """All rows of a table share a fixture's folder, so each damages its own copy."""
    return shutil.copytree(folder, Path(tempfile.mkdtemp(dir=folder.parent)) / "evidence")


def flip_schema(folder: Path) -> None:
    content = remove_checksum(json.loads((folder / "answers.json").read_text()))
    (folder / "answers.json").write_text(json.dumps(add_checksum({**content, "schema": 9})))


def drop_checksum(folder: Path) -> None:
    content = remove_checksum(json.loads((folder / "answers.json").read_text()))
    (folder / "answers.json").write_text(json.dumps(content))


def reshape(folder: Path) -> None:
    (folder / "answers.json").write_text(json.dumps(add_checksum({"schema": 1, "answers": 5})))


def make_sparse(path: Path) -> None:
    path.unlink()
    with path.open("wb") as file:
        file.truncate(1 << 30)


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def link_to_itself(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


@for_each(
    ("damage", "words"),
    [
        (lambda folder: (folder / "claims.toml").unlink(), "cannot be read (No such file"),
        (lambda folder: (folder / "answers.json").unlink(), "cannot be read (No such file"),
        (lambda folder: (folder / "claims.toml").write_text("\0"), "is not TOML"),
        (lambda folder: (folder / "claims.toml").write_bytes(b"\xff"), "not UTF-8"),
        (lambda folder: (folder / "answers.json").write_text("[" * 100_000), "has changed since it was written"),
        (lambda folder: (folder / "answers.json").write_text("[]"), "is not a list of answers"),
        (lambda folder: make_sparse(folder / "claims.toml"), "it has 1.00 GiB, and at most 4.00 MiB are read"),
        (lambda folder: make_sparse(folder / "answers.json"), "at most 64.0 MiB are read"),
        (lambda folder: make_pipe(folder / "claims.toml"), "it is a named pipe"),
        (lambda folder: make_pipe(folder / "answers.json"), "it is a named pipe"),
        (lambda folder: link_to_itself(folder / "claims.toml"), "Too many levels of symbolic links"),
        (flip_schema, "was written by another version of fp8bench"),
        (drop_checksum, "its checksum is missing"),
        (reshape, "is not a list of answers"),
    ],
)
def test_a_damaged_folder_is_refused_in_a_sentence(
    evidence: Path, say: Say, damage: Callable[[Path], object], words: str
) -> None:
    folder = copy_of(evidence)
    damage(folder)
    code, out, err = say("check", str(folder))
    assert (code, out) == (2, "") and words in only_sentence(err), err


@for_each(
    ("damage", "words"),
    [
        (make_sparse, "it has 1.00 GiB, and at most 256 MiB are read"),
        (make_pipe, "it is a named pipe"),
        (link_to_itself, "Too many levels of symbolic links"),
        (lambda path: path.write_bytes(b""), "it cannot be read"),
        (lambda path: path.write_text("[" * 100_000), "it cannot be read"),
    ],
)
def test_a_damaged_run_fails_its_answers_alone(evidence: Path, damage: Callable[[Path], object], words: str) -> None:
    folder = copy_of(evidence)
    damage(run_of(folder, "nvfp4-finer"))
    checked = standings(folder)
    assert checked["nvfp4-finer"][0] is AnswerCheckOutcome.ANSWER_FAILS and words in checked["nvfp4-finer"][1]
    assert {standing for name, (standing, _) in checked.items() if name != "nvfp4-finer"} == {
        AnswerCheckOutcome.ANSWER_HOLDS
    }


def test_folders_that_are_none_are_refused_in_a_sentence(say: Say) -> None:
    Path("empty").mkdir()
    Path("file").write_text("")
    for name, words in (("empty", "No such file"), ("file", "Not a directory"), ("/dev/null", "Not a directory")):
        code, _, err = say("check", name)
        assert code == 2 and words in only_sentence(err), err
