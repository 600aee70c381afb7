"""The checklist: whether a step is faster and what limits it, whether it saves memory, and whether the model still
learns."""

from __future__ import annotations

from fp8bench import units
from fp8bench.analysis.energy import Demand, energy_ratio, why_no_energy
from fp8bench.analysis.roofline import gain_of
from fp8bench.analysis.verdicts import BAND
from fp8bench.features.advise.basis import (
    AdviceRule,
    Basis,
    ComparedCase,
    Reply,
    amdahl,
    gain_text,
    map_ends,
    met_above,
    share_text,
)
from fp8bench.features.advise.values import Ground, Met, Question
from fp8bench.features.sensitivity.study import By, LayerTrial, Study
from fp8bench.features.train import words
from fp8bench.features.train.verdicts.curves import Learned
from fp8bench.features.train.verdicts.verdicts import ArmVerdict
from fp8bench.model import Interval, Label, Level, MemoryRole, Phase, Verdict
from fp8bench.registry import precisions
from fp8bench.report.panels import error_name
from fp8bench.report.words.legend import LARGE, NOT_FINITE, error_word

EMULATED = "emulated here: its time is the cost of emulation"
_PRODUCTS = frozenset({Phase.GEMM})
_ESTIMATED = ", estimated from shares of the step"
_WITH_CASTS = frozenset({Phase.GEMM, Phase.CAST})


def _judge_native(pair: ComparedCase, basis: Basis) -> Reply | str:
    record = pair.record
    level = record.support.level
    if level is Level.NATIVE and record.is_ok:
        return Reply(Met.YES, record.support.reason or "native", (Ground(pair.row, "native"),))
    if level is Level.NATIVE:
        return record.reason or "it was not run"
    return Reply(Met.NO, f"{level.value}: {record.support.reason}", (Ground(pair.row, level.value),))


def _untimed_reason(pair: ComparedCase) -> str:
    if pair.is_emulated:
        return EMULATED if pair.record.support.is_emulated else "the reference is emulated here"
    if not pair.record.is_ok:
        return pair.record.reason or "it was not run"
    if pair.finding is not None and pair.finding.hard:
        return pair.finding.why or f"labelled {', '.join(pair.finding.hard)}"
    return "" if pair.is_timed and pair.speed is not None else "it shared no rounds with a reference"


def _judge_step(pair: ComparedCase, basis: Basis) -> Reply | str:
    if reason := _untimed_reason(pair):
        return reason
    assert pair.finding is not None and pair.speed is not None
    verdict = pair.finding.verdict
    sure = not pair.finding.doubtful
    met = Met.YES if verdict is Verdict.FASTER and sure else Met.UNCLEAR
    if verdict in (Verdict.SLOWER, Verdict.SAME) and sure:
        met = Met.NO
    return Reply(
        met,
        f"{gain_text(pair.speed)} {pair.finding.verdict_words}",
        (Ground(pair.row, f"speed-up of the step {gain_text(pair.speed)}"),),
    )


def bound_of(pair: ComparedCase) -> Interval | None:
    """Returns the reference's speed-up if everything that the precision may change took no time."""
    if pair.reference is None or pair.reference.support.is_emulated or pair.reference.timing is None:
        return None
    share = pair.affected_share()
    return map_ends(share, lambda value: amdahl(value, 0.0)) if share is not None else None


def _judge_product_share(pair: ComparedCase, basis: Basis) -> Reply | str:
    """Assumes that products are as fast as measured here, by a ceiling or alone, and that casts are free."""
    # 1. The share of the step that a precision can affect.
    share = None if pair.reference is None or pair.reference.support.is_emulated else pair.share(_PRODUCTS)
    if share is None or pair.reference is None:
        return "the reference marks no products: it was compiled, or is a model as it came (--shares tells them)"
    least = 1 + basis.least
    grounds = [Ground(pair.reference.case.id, f"products are {share_text(share)} of the step")]
    # 2. Three bounds of the gain, from generous to measured; the tightest counts.
    bounds = [(map_ends(share, lambda value: amdahl(value, 0.0)), "with products that take no time")]
    gain = None
    if pair.is_timed and pair.finding is not None and pair.reference_finding is not None:
        gain = gain_of(pair.record, pair.finding, pair.reference, pair.reference_finding)
    if gain is not None and gain.binds:
        bounds.append((Interval(gain.most, gain.most, gain.most, 0.0), "at the ceiling of its products"))
        grounds.append(Ground(pair.row, f"{units.speed_up(gain.most)} at most by measured ceilings"))
    product_ratio = None if _untimed_reason(pair) else pair.of_reference(_PRODUCTS, _PRODUCTS)
    if product_ratio is not None and product_ratio.high < 1:
        low, high = amdahl(share.low, product_ratio.high), amdahl(share.high, product_ratio.low)
        most = Interval(amdahl(share.point, product_ratio.point), low, high, product_ratio.level)
        bounds.append((most, f"with products {units.speed_up(1 / product_ratio.point)} as fast, as here"))
        grounds.append(Ground(pair.row, f"its products alone are {gain_text(product_ratio.inverse)} as fast"))
    # 3. The generous bound never gives a yes: products take some time.
    most, words = min(bounds, key=lambda bound: bound[0].point)
    met = met_above(most, least)
    if met is Met.YES and len(bounds) == 1:
        taken = f"products are {share_text(share)} of the step{_ESTIMATED * pair.is_estimated}"
        return f"{taken}, and how fast its own are is not known"
    figure = f"{share_text(share)} of the step, which would be {gain_text(most)} {words}"
    figure += _ESTIMATED * pair.is_estimated
    return Reply(met, figure, tuple(grounds))


def _judge_casts(pair: ComparedCase, basis: Basis) -> Reply | str | None:
    if reason := _untimed_reason(pair):
        return reason
    product_ratio = pair.of_reference(_PRODUCTS, _PRODUCTS)
    both = pair.of_reference(_WITH_CASTS, _WITH_CASTS)
    casts = pair.of_reference({Phase.CAST}, _PRODUCTS)
    if product_ratio is None or both is None:
        return "the reference marks no products: it was compiled, or is a model as it came (--shares tells them)"
    if casts is None:
        return "it casts nothing"
    alone, taxed = product_ratio.inverse, both.inverse
    figure = f"products {gain_text(alone)}, with casts {gain_text(taxed)}" + _ESTIMATED * pair.is_estimated
    grounds = (
        Ground(pair.row, f"products alone {gain_text(alone)}"),
        Ground(pair.row, f"casts take {units.percent(casts.point, 0)} of the reference's products"),
    )
    if alone.high < 1 + BAND:
        return Reply(Met.NO, f"{figure}: not faster without casts either", grounds)
    return Reply(met_above(taxed, 1 + BAND), figure, grounds)


# If less than this share of its products is converted, a step gains little.
_HALF = 0.5


def _judge_coverage(pair: ComparedCase, basis: Basis) -> Reply | None:
    coverage = pair.record.coverage
    if coverage is None or not coverage.flops:
        return None
    kinds = [
        f"{kind} {units.percent(converted / coverage.flops, 0)}"
        for kind, (_, converted) in coverage.by_kind().items()
        if converted
    ]
    figure = f"{units.percent(coverage.share, 0)} of product FLOPs" + (f" ({', '.join(kinds)})" if kinds else "")
    largest = max(
        (holder for holder in coverage.holders if not holder.converted), key=lambda holder: holder.flops, default=None
    )
    if largest is not None and largest.flops:
        figure += f"; {largest.name} is not: {largest.reason}"
    return Reply(Met.YES if coverage.share >= _HALF else Met.NO, figure, (Ground(pair.row, figure),))


# A smaller saving counts as none.
_LEAST_SAVING = 0.01
_COPIES = {
    MemoryRole.LOW_WEIGHTS: "low-precision copies of weights",
    MemoryRole.LOW_ACTIVATIONS: "low-precision copies of activations",
}
_KEPT = {MemoryRole.WEIGHTS: "weights", MemoryRole.OPTIMIZER: "optimizer state"}


def _judge_memory(pair: ComparedCase, basis: Basis) -> Reply | str:
    if pair.is_emulated:
        return "emulated here: its memory is the cost of emulation"
    reference = pair.reference
    if pair.record.memory is None or reference is None or reference.memory is None or not reference.memory.peak:
        return "no memory was measured"
    share = pair.record.memory.peak / reference.memory.peak
    roles, reference_roles = dict(pair.record.memory.roles), dict(reference.memory.roles)
    # A ratio of peaks puzzles people: also show what stays the same and what is added.
    unchanged = [
        f"{words} ({units.size(roles[role])})"
        for role, words in _KEPT.items()
        if roles.get(role) and roles[role] >= reference_roles.get(role, 0)
    ]
    copies = [f"{words} ({units.size(roles[role])})" for role, words in _COPIES.items() if roles.get(role)]
    staying = f"what stays: {', '.join(unchanged)}" if unchanged else ""
    details = "; ".join(filter(None, (staying, f"what comes on top: {', '.join(copies)}" if copies else "")))
    figure = f"{units.ratio(share)} of {reference.case.mode}'s peak" + (f"; {details}" if details else "")
    grounds = (
        Ground(pair.row, f"peak {units.size(pair.record.memory.peak)}"),
        Ground(reference.case.id, f"peak {units.size(reference.memory.peak)}"),
    )
    return Reply(Met.YES if share <= 1 - _LEAST_SAVING else Met.NO, figure, grounds)


def _judge_energy(pair: ComparedCase, basis: Basis) -> Reply | str:
    labels: list[Label] = []
    for finding in (pair.finding, pair.reference_finding):
        labels += finding.labels if finding is not None else ()
    ratio = energy_ratio(pair.record, pair.reference, labels)
    if pair.is_emulated:
        return "emulated here: its joules are the cost of emulation"
    if ratio is None:
        return why_no_energy(pair.record) if pair.record.energy is not None else "no energy was measured"
    met = {Demand.LESS: Met.YES, Demand.MORE: Met.NO, Demand.UNCLEAR: Met.UNCLEAR}[ratio.demand]
    ends = f"[{units.significant(ratio.low)}, {units.significant(ratio.high)}]"
    figure = f"{units.ratio(ratio.point)} {ends} of the joules of a step" + (f": {ratio.why}" if ratio.why else "")
    return Reply(met, figure, (Ground(pair.row, figure),))


def _judge_errors(pair: ComparedCase, basis: Basis) -> Reply | str:
    """Describes each error by its size. A large one rules the precision out; whether a smaller one matters, only a
    training shows."""
    errors = [error for error in pair.record.measurements if error.metric.endswith("_error") and error.samples]
    problem = pair.record.reason if not pair.record.is_ok else ""
    if NOT_FINITE in problem:
        return Reply(Met.NO, problem, (Ground(pair.row, problem),))
    if problem or not errors:
        return problem or "no error was measured"
    figures, sizes = [], set()
    for error in errors:
        size = error_word((error.metric, sample) for sample in error.samples)
        sizes.add(size)
        figures.append(f"{size} {error_name(error)} ({units.relative_error(max(error.samples))})")
    words = ", ".join(figures)
    is_near = not sizes & {LARGE, NOT_FINITE} and not pair.record.not_finite
    return Reply(Met.YES if is_near else Met.NO, words, (Ground(pair.row, words),))


def study_of(pair: ComparedCase, basis: Basis) -> Study | None:
    """Returns the newest study of this workload, device and precision, and of the model if that is a parameter."""
    case = pair.record.case
    params = dict(case.params)
    fitting = []
    for study in basis.studies:
        same_case = (study.workload, study.low, study.device) == (case.workload, case.precision, case.device)
        model = {name: value for name, value in study.params if name in ("size", "make")}
        same_model = {name: params.get(name, value) for name, value in model.items()} == model
        if same_case and same_model and not study.baseline.failure and study.by is not By.FORMAT:
            fitting.append(study)
    return max(fitting, key=lambda study: study.started, default=None)


def tried_as(pair: ComparedCase, study: Study) -> LayerTrial:
    """Returns the candidate with the case's precision map, or else the one with all layers low."""
    return next(
        (candidate for candidate in study.candidates if candidate.precision_map == pair.record.case.precision_map),
        study.candidates[0],
    )


def _judge_layers(pair: ComparedCase, basis: Basis) -> Reply | str | None:
    study = study_of(pair, basis)
    if (study is None and not pair.trains) or precisions.unit_scaled(pair.record.case.precision):
        return None  # layers of a unit-scaled model do not work in a plain model
    if study is None or not study.candidates:
        return "no layer was tried alone"
    row = f"sensitivity study {study.path or study.started}"
    trial = tried_as(pair, study)
    gap = study.gap(trial)
    change = "none" if gap is None else units.change(1 + gap)
    noise = "an unknown noise" if study.noise is None else f"a noise of {units.percent(study.noise)}"
    figure = f"layers low: {len(trial.low)}, loss {change} beside {noise} in {study.steps} steps"
    grounds = (Ground(row, figure),)
    if study.is_undecided:
        return Reply(Met.UNCLEAR, f"{figure}: no layer can be told from another", grounds)
    return Reply(Met.YES if study.keeps(trial) else Met.NO, figure, grounds)


def arm_of(pair: ComparedCase, basis: Basis) -> ArmVerdict | None:
    """Returns the training's verdict on an arm in this mode, preferably one with default settings."""
    if basis.training is None:
        return None
    arms = [arm for arm in basis.training.verdicts.arms if arm.arm.precision == pair.mode]
    return min(arms, key=lambda arm: len(arm.arm.settings), default=None)


_LEARNS = {
    Learned.WITHIN_NOISE: Met.YES,
    Learned.BETTER: Met.YES,
    Learned.WORSE: Met.NO,
    Learned.DIVERGED: Met.NO,
}


def _judge_training(pair: ComparedCase, basis: Basis) -> Reply | str | None:
    if not pair.trains:
        return None
    arm = arm_of(pair, basis)
    if arm is None or basis.training is None:
        return "no training had an arm in it"
    figure = words.verdict(arm, basis.training.verdicts)
    training = basis.training.kept.training
    model = training.request.settings.display_name
    ground = Ground(f"training {training.id}, arm {arm.arm.name}", f"{figure}, {model}, {training.request.steps} steps")
    met = Met.TOLERATED if arm.judged.is_tolerated else _LEARNS.get(arm.judged.learned, Met.UNCLEAR)
    return Reply(met, figure, (ground,))


# The checklist, in order.
RULES = (
    AdviceRule("step", Question.PAYS, "Is the whole step faster?", _judge_step, "{again}"),
    AdviceRule("native", Question.PAYS, "Is it native on this device?", _judge_native, "fp8bench doctor"),
    # If products are a quarter of a step, making them 1.6 times as fast gains 10%.
    AdviceRule("amdahl", Question.PAYS, "Do its products take enough of the step?", _judge_product_share,
               "fp8bench suite ceilings, then {again}"),
    # In publications, products with casts gain 1.4 times where products of ready operands gain 1.9.
    AdviceRule("casts", Question.PAYS, "Do casts leave what the products gain?", _judge_casts, "{again}"),
    # Converting only nn.Linear gains nothing for GPT-2 or a ResNet, and covers 18% of Mixtral.
    AdviceRule("coverage", Question.PAYS, "Can most of its products be converted?", _judge_coverage, ""),
    AdviceRule(
        "energy", Question.PAYS, "Does it save energy?", _judge_energy, "{again}, where a device tells its energy"
    ),
    # Training in FP8 keeps weights and optimizer state, and adds copies: published peaks are 1.00 of bf16's.
    AdviceRule("memory", Question.FITS, "Does it save memory?", _judge_memory, "{again}"),
    # A short training with one seed is inconclusive: seeds differ as much as formats.
    AdviceRule("learns", Question.LEARNS, "Does it still learn?", _judge_training, "{train}"),
    AdviceRule("errors", Question.LEARNS, "Are its errors small enough?", _judge_errors, "{again}"),
    # Published recipes keep heads, routers, first and last layers in high precision.
    AdviceRule("layers", Question.LEARNS, "Do all layers bear it?", _judge_layers, "{study}"),
)  # fmt: skip
