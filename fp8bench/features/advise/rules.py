"""The checklist: is a step faster and what limits it, does it save memory, and does the model still learn?"""

from __future__ import annotations

from fp8bench import units
from fp8bench.analysis.energy import Demand, energy_ratio, why_no_energy
from fp8bench.analysis.roofline import compute_gain
from fp8bench.analysis.verdicts import VERDICT_BAND
from fp8bench.features.advise.basis import (
    AdviceRule,
    Basis,
    ComparedCase,
    Reply,
    amdahl,
    compare_with_minimum,
    map_interval,
    show_gain,
    show_share,
)
from fp8bench.features.advise.values import Ground, Met, Question
from fp8bench.features.sensitivity.study import LayerTrial, LoweredUnit, Study
from fp8bench.features.train import words
from fp8bench.features.train.verdicts.curves import Learned
from fp8bench.features.train.verdicts.verdicts import ArmVerdict
from fp8bench.model import Interval, Label, Level, MemoryRole, Phase, Verdict
from fp8bench.model.specs import spec_of
from fp8bench.registry import precisions
from fp8bench.report.panels import error_name
from fp8bench.report.words.legend import LARGE, MEMORY_WORDS, NOT_FINITE, error_word

EMULATED = "emulated here: its time is the cost of emulation"
_PRODUCT_PHASE = frozenset({Phase.GEMM})
_ESTIMATED_NOTE = " (estimated from shares of the step)"
_NO_PRODUCTS = "the reference marks no products: it was compiled, or is a model as it came (--shares tells them)"
_PRODUCT_AND_CAST_PHASES = frozenset({Phase.GEMM, Phase.CAST})


def _judge_native(pair: ComparedCase, basis: Basis) -> Reply | str:
    record = pair.record
    support_level = record.support.level
    if support_level is Level.NATIVE and record.is_ok:
        return Reply(Met.YES, record.support.reason or "native", (Ground(pair.row, "native"),))
    if support_level is Level.NATIVE:
        return record.reason or "it was not run"
    return Reply(Met.NO, f"{support_level.value}: {record.support.reason}", (Ground(pair.row, support_level.value),))


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
    is_certain = not pair.finding.doubtful
    answer_by_speed = Met.YES if verdict is Verdict.FASTER and is_certain else Met.UNCLEAR
    if verdict in (Verdict.SLOWER, Verdict.SAME) and is_certain:
        answer_by_speed = Met.NO
    return Reply(
        answer_by_speed,
        f"{show_gain(pair.speed)} {pair.finding.verdict_words}",
        (Ground(pair.row, f"speed-up of the step {show_gain(pair.speed)}"),),
    )


def amdahl_bound(pair: ComparedCase) -> Interval | None:
    """Returns the largest possible speed-up of the reference's step: everything that the precision may change takes
    no time.
    """
    if pair.reference is None or pair.reference.support.is_emulated or pair.reference.timing is None:
        return None
    share = pair.affected_share()
    return map_interval(share, lambda value: amdahl(value, 0.0)) if share is not None else None


def _judge_product_share(pair: ComparedCase, basis: Basis) -> Reply | str:
    """Judges how much a step would gain if only its products became faster. It assumes that products become as fast
    as measured here, or as the device's ceiling allows, and that casts are free.
    """
    # 1. Find the share of the step that a precision can make faster.
    share = None if pair.reference is None or pair.reference.support.is_emulated else pair.share(_PRODUCT_PHASE)
    if share is None or pair.reference is None:
        return _NO_PRODUCTS
    minimum = 1 + basis.least
    grounds = [Ground(pair.reference.case.id, f"products are {show_share(share)} of the step")]
    # 2. Collect up to three upper bounds of the gain. The smallest bound counts.
    bounds = [(map_interval(share, lambda value: amdahl(value, 0.0)), "with products that take no time")]
    gain = None
    if pair.is_timed and pair.finding is not None and pair.reference_finding is not None:
        gain = compute_gain(pair.record, pair.finding, pair.reference, pair.reference_finding)
    if gain is not None and gain.is_upper_bound:
        bounds.append(
            (Interval(gain.max_speedup, gain.max_speedup, gain.max_speedup, 0.0), "at the ceiling of its products")
        )
        grounds.append(Ground(pair.row, f"{units.speed_up(gain.max_speedup)} at most by measured ceilings"))
    product_ratio = None if _untimed_reason(pair) else pair.ratio_to_reference(_PRODUCT_PHASE, _PRODUCT_PHASE)
    if product_ratio is not None and product_ratio.high < 1:
        low = amdahl(share.low, product_ratio.high)
        high = amdahl(share.high, product_ratio.low)
        gain_bound = Interval(amdahl(share.point, product_ratio.point), low, high, product_ratio.level)
        bounds.append((gain_bound, f"with products {units.speed_up(1 / product_ratio.point)} as fast"))
        grounds.append(Ground(pair.row, f"its products alone are {show_gain(product_ratio.inverse)} as fast"))
    # 3. The bound with products that take no time never means "yes", because real products take time.
    gain_bound, condition = min(bounds, key=lambda bound: bound[0].point)
    met = compare_with_minimum(gain_bound, minimum)
    if met is Met.YES and len(bounds) == 1:
        share_sentence = f"products are {show_share(share)} of the step{_ESTIMATED_NOTE * pair.is_estimated}"
        return f"{share_sentence}, but the speed of low-precision products was not measured"
    figure = f"products are {show_share(share)} of the step; {condition}, the step would be "
    figure += f"{show_gain(gain_bound)} as fast{_ESTIMATED_NOTE * pair.is_estimated}"
    return Reply(met, figure, tuple(grounds))


def _judge_casts(pair: ComparedCase, basis: Basis) -> Reply | str | None:
    if reason := _untimed_reason(pair):
        return reason
    product_ratio = pair.ratio_to_reference(_PRODUCT_PHASE, _PRODUCT_PHASE)
    with_casts_ratio = pair.ratio_to_reference(_PRODUCT_AND_CAST_PHASES, _PRODUCT_AND_CAST_PHASES)
    casts = pair.ratio_to_reference({Phase.CAST}, _PRODUCT_PHASE)
    if product_ratio is None or with_casts_ratio is None:
        return _NO_PRODUCTS
    if casts is None:
        return "it casts nothing"
    product_gain = product_ratio.inverse
    gain_with_casts = with_casts_ratio.inverse
    figure = f"products {show_gain(product_gain)}, with casts {show_gain(gain_with_casts)}"
    figure += _ESTIMATED_NOTE * pair.is_estimated
    grounds = (
        Ground(pair.row, f"products alone {show_gain(product_gain)}"),
        Ground(pair.row, f"casts take {units.percent(casts.point, 0)} of the reference's products"),
    )
    if product_gain.high < 1 + VERDICT_BAND:
        return Reply(Met.NO, f"{figure}: not faster without casts either", grounds)
    return Reply(compare_with_minimum(gain_with_casts, 1 + VERDICT_BAND), figure, grounds)


# If less than this share of a step's product FLOPs is converted, the step gains little.
_MIN_COVERAGE = 0.5


def _judge_coverage(pair: ComparedCase, basis: Basis) -> Reply | None:
    coverage = pair.record.coverage
    if coverage is None or not coverage.flops:
        return None
    kinds = [
        f"{kind} {units.percent(converted / coverage.flops, 0)}"
        for kind, (_, converted) in coverage.by_kind().items()
        if converted
    ]
    figure = f"{units.percent(coverage.share, 0)} of product FLOPs"
    if kinds:
        figure += f" ({', '.join(kinds)})"
    unconverted = [holder for holder in coverage.holders if holder.flops and not holder.converted]
    if unconverted:
        largest = max(unconverted, key=lambda holder: holder.flops)
        figure += f"; {largest.name} is not: {largest.reason}"
    return Reply(Met.YES if coverage.share >= _MIN_COVERAGE else Met.NO, figure, (Ground(pair.row, figure),))


# A smaller saving of memory counts as none.
_MIN_SAVING = 0.01


def _judge_memory(pair: ComparedCase, basis: Basis) -> Reply | str:
    if pair.is_emulated:
        return "emulated here: its memory is the cost of emulation"
    reference = pair.reference
    if pair.record.memory is None or reference is None or reference.memory is None or not reference.memory.peak:
        return "no memory was measured"
    share = pair.record.memory.peak / reference.memory.peak
    roles = dict(pair.record.memory.roles)
    reference_roles = dict(reference.memory.roles)
    # The ratio of peaks alone is hard to interpret. So also show how each large part of the memory changes.
    texts_by_change: dict[str, list[str]] = {"smaller": [], "unchanged": [], "larger": []}
    for role in MemoryRole if roles and reference_roles else ():
        size = roles.get(role, 0)
        reference_size = reference_roles.get(role, 0)
        change = "unchanged" if size == reference_size else "smaller" if size < reference_size else "larger"
        if max(size, reference_size) >= _MIN_SAVING * reference.memory.peak:
            instead_text = "" if change == "unchanged" else f" instead of {units.size(reference_size)}"
            texts_by_change[change].append(f"{MEMORY_WORDS[role]} ({units.size(size)}{instead_text})")
    details = [f"; {change}: {', '.join(texts)}" for change, texts in texts_by_change.items() if texts]
    figure = f"{units.ratio(share)} of {reference.case.mode}'s peak{''.join(details)}"
    grounds = (
        Ground(pair.row, f"peak {units.size(pair.record.memory.peak)}"),
        Ground(reference.case.id, f"peak {units.size(reference.memory.peak)}"),
    )
    return Reply(Met.YES if share <= 1 - _MIN_SAVING else Met.NO, figure, grounds)


_ANSWERS_BY_DEMAND = {Demand.LESS: Met.YES, Demand.MORE: Met.NO, Demand.UNCLEAR: Met.UNCLEAR}


def _judge_energy(pair: ComparedCase, basis: Basis) -> Reply | str:
    if pair.is_emulated:
        return "emulated here: its joules are the cost of emulation"
    labels: list[Label] = []
    for finding in (pair.finding, pair.reference_finding):
        labels += finding.labels if finding is not None else ()
    ratio = energy_ratio(pair.record, pair.reference, labels)
    if ratio is None and pair.record.energy is not None:
        # Measuring again on this machine would give no energy either, so no command is proposed.
        return Reply(Met.UNKNOWN, why_no_energy(pair.record))
    if ratio is None:
        return "no energy was measured"
    interval_text = f"[{units.significant(ratio.low)}, {units.significant(ratio.high)}]"
    figure = f"{units.ratio(ratio.point)} {interval_text} of the joules of a step"
    if ratio.why:
        figure += f": {ratio.why}"
    return Reply(_ANSWERS_BY_DEMAND[ratio.demand], figure, (Ground(pair.row, figure),))


def _judge_errors(pair: ComparedCase, basis: Basis) -> Reply | str:
    """Describes each error by its size. A large error rules the precision out. Whether a smaller error matters, only
    a training shows.
    """
    errors = [error for error in pair.record.measurements if error.metric.endswith("_error") and error.samples]
    problem = pair.record.reason if not pair.record.is_ok else ""
    if NOT_FINITE in problem:
        return Reply(Met.NO, problem, (Ground(pair.row, problem),))
    if problem or not errors:
        return problem or "no error was measured"
    figures = []
    size_words = set()
    for error in errors:
        size_word = error_word((error.metric, sample) for sample in error.samples)
        size_words.add(size_word)
        limit = units.relative_error(spec_of(error.metric).error_sizes[-1])
        figures.append(f"{size_word} {error_name(error)} ({units.relative_error(max(error.samples))}, limit {limit})")
    sentence = ", ".join(figures)
    is_small_enough = not size_words & {LARGE, NOT_FINITE} and not pair.record.not_finite
    return Reply(Met.YES if is_small_enough else Met.NO, sentence, (Ground(pair.row, sentence),))


def find_study(pair: ComparedCase, basis: Basis) -> Study | None:
    """Returns the newest study of this suite, device and precision, and of the same model if the suite has several."""
    case = pair.record.case
    params = dict(case.params)
    matching = []
    for study in basis.studies:
        is_same_case = (study.workload, study.low, study.device) == (case.workload, case.precision, case.device)
        model = {name: value for name, value in study.params if name in ("size", "make")}
        is_same_model = {name: params.get(name, value) for name, value in model.items()} == model
        if is_same_case and is_same_model and not study.baseline.failure and study.by is not LoweredUnit.FORMAT:
            matching.append(study)
    return max(matching, key=lambda study: study.started, default=None)


def find_trial(pair: ComparedCase, study: Study) -> LayerTrial:
    """Returns the candidate with the precision map of the case, or else the candidate with all layers low."""
    return next(
        (candidate for candidate in study.candidates if candidate.precision_map == pair.record.case.precision_map),
        study.candidates[0],
    )


def _judge_layers(pair: ComparedCase, basis: Basis) -> Reply | str | None:
    study = find_study(pair, basis)
    if (study is None and not pair.trains) or precisions.unit_scaled(pair.record.case.precision):
        return None  # single layers of a unit-scaled model do not work in other models
    if study is None or not study.candidates:
        return "no study has lowered its layers one at a time"
    row = f"sensitivity study {study.path or study.started}"
    trial = find_trial(pair, study)
    loss_gap = study.gap(trial)
    change_text = "none" if loss_gap is None else units.change(1 + loss_gap)
    noise = "an unknown noise" if study.noise is None else f"a noise of {units.percent(study.noise)}"
    figure = f"layers low: {len(trial.low)}, loss {change_text} beside {noise} in {study.steps} steps"
    grounds = (Ground(row, figure),)
    if study.is_undecided:
        return Reply(Met.UNCLEAR, f"{figure}: layers cannot be distinguished", grounds)
    return Reply(Met.YES if study.keeps(trial) else Met.NO, figure, grounds)


def find_arm(pair: ComparedCase, basis: Basis) -> ArmVerdict | None:
    """Returns the training's verdict on an arm in this mode. If several arms have this mode, the one with the fewest
    changed settings is used.
    """
    if basis.training is None:
        return None
    arms = [arm for arm in basis.training.verdicts.arms if arm.arm.precision == pair.mode]
    return min(arms, key=lambda arm: len(arm.arm.settings), default=None)


_ANSWERS_BY_VERDICT = {
    Learned.WITHIN_NOISE: Met.YES,
    Learned.BETTER: Met.YES,
    Learned.WORSE: Met.NO,
    Learned.DIVERGED: Met.NO,
}


def _judge_training(pair: ComparedCase, basis: Basis) -> Reply | str | None:
    if not pair.trains:
        return None
    arm = find_arm(pair, basis)
    if arm is None or basis.training is None:
        return "no training has an arm in this precision"
    figure = words.describe_verdict(arm, basis.training.verdicts)
    training = basis.training.kept.training
    model = training.request.settings.display_name
    ground = Ground(f"training {training.id}, arm {arm.arm.name}", f"{figure}, {model}, {training.request.steps} steps")
    met = Met.TOLERATED if arm.judged.is_tolerated else _ANSWERS_BY_VERDICT.get(arm.judged.learned, Met.UNCLEAR)
    return Reply(met, figure, (ground,))


# The checklist, in order.
RULES = (
    AdviceRule("step", Question.PAYS, "Is the whole step faster?", _judge_step, "{again}"),
    AdviceRule("native", Question.PAYS, "Is it native on this device?", _judge_native, "fp8bench doctor"),
    # If products are a quarter of a step, products that are 1.6 times as fast gain 10%.
    AdviceRule("amdahl", Question.PAYS, "Would faster products alone be worthwhile?", _judge_product_share,
               "fp8bench suite ceilings{store}, then {again}"),
    # In publications, products gain 1.9 times if their operands are ready, and 1.4 times with casts.
    AdviceRule("casts", Question.PAYS, "Do the products gain more than casts cost?", _judge_casts, "{again}"),
    # If only nn.Linear is converted, GPT-2 and ResNets gain nothing, and coverage of Mixtral is 18%.
    AdviceRule("coverage", Question.PAYS, "Can most of its products be converted?", _judge_coverage, ""),
    AdviceRule("energy", Question.PAYS, "Does it save energy?", _judge_energy, "{again}"),
    # Training in FP8 keeps weights and optimizer state, and adds copies: published peaks are 1.00 times bf16's.
    AdviceRule("memory", Question.FITS, "Does it save memory?", _judge_memory, "{again}"),
    # A short training with one seed is inconclusive, because seeds differ as much as formats.
    AdviceRule("learns", Question.LEARNS, "Does it learn as well?", _judge_training, "{train}"),
    AdviceRule("errors", Question.LEARNS, "Are its errors small enough?", _judge_errors, "{again}"),
    # Published recipes keep heads, routers, first and last layers in high precision.
    AdviceRule("layers", Question.LEARNS, "Can all layers be low?", _judge_layers, "{study}"),
)  # fmt: skip
