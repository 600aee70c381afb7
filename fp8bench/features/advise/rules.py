"""The checklist: is a step faster and what limits it, does it save memory, and does the model still learn?"""

from __future__ import annotations

from fp8bench import units
from fp8bench.analysis.energy import EnergyDemand, energy_ratio, why_no_energy
from fp8bench.analysis.roofline import compute_possible_speedup
from fp8bench.analysis.verdicts import VERDICT_BAND
from fp8bench.features.advise.basis import (
    AdviceBasis,
    AdviceRule,
    ComparedCase,
    RuleReply,
    amdahl,
    compare_with_minimum,
    format_share_interval,
    show_gain,
    transform_interval,
)
from fp8bench.features.advise.values import AdviceGround, AdviceQuestion, AdviceRuleOutcome
from fp8bench.features.sensitivity.study import LoweredLayersTrial, LoweredUnit, SensitivityStudy
from fp8bench.features.train import words
from fp8bench.features.train.verdicts.curves import LearningVerdict
from fp8bench.features.train.verdicts.verdicts import ArmVerdict
from fp8bench.model import Interval, Label, Level, MemoryRole, Phase, Verdict
from fp8bench.model.specs import find_metric_spec
from fp8bench.registry import precisions
from fp8bench.report.panels import error_name
from fp8bench.report.words.legend import LARGE, MEMORY_ROLE_DESCRIPTIONS, NOT_FINITE, describe_error_size

EMULATED = "emulated here: its time is the cost of emulation"
_PRODUCT_PHASES = frozenset({Phase.GEMM})
_ESTIMATED_NOTE = " (estimated from shares of the step)"
_NO_PRODUCTS = "the reference marks no products: it was compiled, or is an unconverted model (--shares shows them)"
_PRODUCT_AND_CAST_PHASES = frozenset({Phase.GEMM, Phase.CAST})


def _judge_native(pair: ComparedCase, basis: AdviceBasis) -> RuleReply | str:
    record = pair.record
    support_level = record.support.level
    if support_level is Level.NATIVE and record.is_ok:
        return RuleReply(AdviceRuleOutcome.YES, record.support.reason or "native", (AdviceGround(pair.row, "native"),))
    if support_level is Level.NATIVE:
        return record.reason or "it was not run"
    return RuleReply(
        AdviceRuleOutcome.NO,
        f"{support_level.value}: {record.support.reason}",
        (AdviceGround(pair.row, support_level.value),),
    )


def _explain_missing_time(pair: ComparedCase) -> str:
    if pair.is_emulated:
        return EMULATED if pair.record.support.is_emulated else "the reference is emulated here"
    if not pair.record.is_ok:
        return pair.record.reason or "it was not run"
    if pair.finding is not None and pair.finding.hard:
        return pair.finding.why or f"labelled {', '.join(pair.finding.hard)}"
    return "" if pair.is_timed and pair.speed is not None else "it shared no rounds with a reference"


def _judge_step_speed(pair: ComparedCase, basis: AdviceBasis) -> RuleReply | str:
    if reason := _explain_missing_time(pair):
        return reason
    assert pair.finding is not None and pair.speed is not None
    verdict = pair.finding.verdict
    is_trustworthy = not pair.finding.doubtful
    outcome_by_speed = (
        AdviceRuleOutcome.YES if verdict is Verdict.FASTER and is_trustworthy else AdviceRuleOutcome.UNCLEAR
    )
    if verdict in (Verdict.SLOWER, Verdict.SAME) and is_trustworthy:
        outcome_by_speed = AdviceRuleOutcome.NO
    return RuleReply(
        outcome_by_speed,
        f"{show_gain(pair.speed)} {pair.finding.verdict_words}",
        (AdviceGround(pair.row, f"speed-up of the step {show_gain(pair.speed)}"),),
    )


def compute_amdahl_bound(pair: ComparedCase) -> Interval | None:
    """Returns the speed-up of the reference's step if everything that the precision may change took no time."""
    if pair.reference is None or pair.reference.support.is_emulated or pair.reference.timing is None:
        return None
    affected_share = pair.affected_share()
    return transform_interval(affected_share, lambda value: amdahl(value, 0.0)) if affected_share is not None else None


def _judge_product_share(pair: ComparedCase, basis: AdviceBasis) -> RuleReply | str:
    """Judges how much a step would gain if only its products became faster. It assumes that products become as fast
    as measured here, or as the device's ceiling allows, and that casts are free.
    """
    # 1. Find the share of the step that a precision can make faster.
    product_share = (
        None
        if pair.reference is None or pair.reference.support.is_emulated
        else pair.measure_phase_share(_PRODUCT_PHASES)
    )
    if product_share is None or pair.reference is None:
        return _NO_PRODUCTS
    min_speed_up = 1 + basis.min_gain
    advice_grounds = [
        AdviceGround(pair.reference.case.id, f"products are {format_share_interval(product_share)} of the step")
    ]
    # 2. Collect up to three upper bounds of the gain. The smallest bound counts.
    speed_up_bounds = [
        (transform_interval(product_share, lambda value: amdahl(value, 0.0)), "with products that take no time")
    ]
    gain = None
    if pair.is_timed and pair.finding is not None and pair.reference_finding is not None:
        gain = compute_possible_speedup(pair.record, pair.finding, pair.reference, pair.reference_finding)
    if gain is not None and gain.is_upper_bound:
        speed_up_bounds.append(
            (Interval(gain.max_speedup, gain.max_speedup, gain.max_speedup, 0.0), "with products at their ceiling")
        )
        advice_grounds.append(
            AdviceGround(pair.row, f"{units.speed_up(gain.max_speedup)} at most by measured ceilings")
        )
    product_time_ratio = (
        None if _explain_missing_time(pair) else pair.ratio_to_reference(_PRODUCT_PHASES, _PRODUCT_PHASES)
    )
    if product_time_ratio is not None and product_time_ratio.high < 1:
        # The smallest share with the slowest products gives the lower bound, the opposite the upper bound.
        low = amdahl(product_share.low, product_time_ratio.high)
        high = amdahl(product_share.high, product_time_ratio.low)
        gain_bound = Interval(
            amdahl(product_share.point, product_time_ratio.point), low, high, product_time_ratio.level
        )
        speed_up_bounds.append((gain_bound, f"with products {units.speed_up(1 / product_time_ratio.point)} as fast"))
        advice_grounds.append(
            AdviceGround(pair.row, f"its products alone are {show_gain(product_time_ratio.inverse)} as fast")
        )
    # 3. Do not answer "yes" if the only bound is that of products that take no time, because real products take time.
    gain_bound, condition = min(speed_up_bounds, key=lambda bound: bound[0].point)
    rule_outcome = compare_with_minimum(gain_bound, min_speed_up)
    share_text = f"products are {format_share_interval(product_share)} of the step"
    note = _ESTIMATED_NOTE * pair.is_reference_estimated
    if rule_outcome is AdviceRuleOutcome.YES and len(speed_up_bounds) == 1:
        return f"{share_text}{note}, but the speed of low-precision products was not measured"
    figure_text = f"{share_text}; {condition}, the step would be {show_gain(gain_bound)} as fast{note}"
    return RuleReply(rule_outcome, figure_text, tuple(advice_grounds))


def _judge_cast_costs(pair: ComparedCase, basis: AdviceBasis) -> RuleReply | str | None:
    if reason := _explain_missing_time(pair):
        return reason
    # 1. Compare the products alone, products with casts, and the casts with the reference's products.
    product_time_ratio = pair.ratio_to_reference(_PRODUCT_PHASES, _PRODUCT_PHASES)
    product_and_cast_ratio = pair.ratio_to_reference(_PRODUCT_AND_CAST_PHASES, _PRODUCT_AND_CAST_PHASES)
    cast_time_ratio = pair.ratio_to_reference({Phase.CAST}, _PRODUCT_PHASES)
    if product_time_ratio is None or product_and_cast_ratio is None:
        return _NO_PRODUCTS
    if cast_time_ratio is None:
        return "it casts nothing"
    product_speed_up = product_time_ratio.inverse
    speed_up_with_casts = product_and_cast_ratio.inverse
    figure_text = f"products {show_gain(product_speed_up)}, with casts {show_gain(speed_up_with_casts)}"
    figure_text += _ESTIMATED_NOTE * pair.is_reference_estimated
    advice_grounds = (
        AdviceGround(pair.row, f"products alone {show_gain(product_speed_up)}"),
        AdviceGround(pair.row, f"casts take {units.percent(cast_time_ratio.point, 0)} of the reference's products"),
    )
    # 2. If the products alone are not faster, the casts are not the cause.
    if product_speed_up.high < 1 + VERDICT_BAND:
        return RuleReply(
            AdviceRuleOutcome.NO, f"{figure_text}: products are not faster without casts either", advice_grounds
        )
    return RuleReply(compare_with_minimum(speed_up_with_casts, 1 + VERDICT_BAND), figure_text, advice_grounds)


# If less than this share of a step's product FLOPs is converted, the step gains little.
_MIN_CONVERTED_FLOP_SHARE = 0.5


def _judge_coverage(pair: ComparedCase, basis: AdviceBasis) -> RuleReply | None:
    coverage = pair.record.coverage
    if coverage is None or not coverage.flops:
        return None
    layer_kind_texts = [
        f"{kind} {units.percent(converted_flops / coverage.flops, 0)}"
        for kind, (_, converted_flops) in coverage.by_kind().items()
        if converted_flops
    ]
    figure_text = f"{units.percent(coverage.share, 0)} of product FLOPs"
    if layer_kind_texts:
        figure_text += f" ({', '.join(layer_kind_texts)})"
    # Name the unconverted layer with the most FLOPs, whose conversion would add most to the coverage.
    unconverted_weights = [
        weight_holder for weight_holder in coverage.holders if weight_holder.flops and not weight_holder.converted
    ]
    if unconverted_weights:
        largest_unconverted_weight = max(unconverted_weights, key=lambda weight_holder: weight_holder.flops)
        figure_text += f"; {largest_unconverted_weight.name} is not: {largest_unconverted_weight.reason}"
    return RuleReply(
        AdviceRuleOutcome.YES if coverage.share >= _MIN_CONVERTED_FLOP_SHARE else AdviceRuleOutcome.NO,
        figure_text,
        (AdviceGround(pair.row, figure_text),),
    )


# A smaller saving of memory counts as none.
_MIN_MEMORY_SAVING = 0.01


def _judge_memory_saving(pair: ComparedCase, basis: AdviceBasis) -> RuleReply | str:
    if pair.is_emulated:
        return "emulated here: its memory is the cost of emulation"
    reference = pair.reference
    if pair.record.memory is None or reference is None or reference.memory is None or not reference.memory.peak:
        return "no memory was measured"
    peak_memory_ratio = pair.record.memory.peak / reference.memory.peak
    bytes_by_role = dict(pair.record.memory.roles)
    reference_bytes_by_role = dict(reference.memory.roles)
    # The ratio of peak memories does not show its cause. So also list how each large part of the memory changes.
    texts_by_change: dict[str, list[str]] = {"smaller": [], "unchanged": [], "larger": []}
    for role in MemoryRole if bytes_by_role and reference_bytes_by_role else ():
        size = bytes_by_role.get(role, 0)
        reference_size = reference_bytes_by_role.get(role, 0)
        change = "unchanged" if size == reference_size else "smaller" if size < reference_size else "larger"
        if max(size, reference_size) >= _MIN_MEMORY_SAVING * reference.memory.peak:
            previous_size_text = "" if change == "unchanged" else f" instead of {units.size(reference_size)}"
            texts_by_change[change].append(f"{MEMORY_ROLE_DESCRIPTIONS[role]} ({units.size(size)}{previous_size_text})")
    change_texts = [f"; {change}: {', '.join(texts)}" for change, texts in texts_by_change.items() if texts]
    figure_text = f"{units.ratio(peak_memory_ratio)} of {reference.case.mode}'s peak{''.join(change_texts)}"
    advice_grounds = (
        AdviceGround(pair.row, f"peak {units.size(pair.record.memory.peak)}"),
        AdviceGround(reference.case.id, f"peak {units.size(reference.memory.peak)}"),
    )
    return RuleReply(
        AdviceRuleOutcome.YES if peak_memory_ratio <= 1 - _MIN_MEMORY_SAVING else AdviceRuleOutcome.NO,
        figure_text,
        advice_grounds,
    )


_OUTCOME_BY_ENERGY_DEMAND = {
    EnergyDemand.LESS: AdviceRuleOutcome.YES,
    EnergyDemand.MORE: AdviceRuleOutcome.NO,
    EnergyDemand.UNCLEAR: AdviceRuleOutcome.UNCLEAR,
}


def _judge_energy(pair: ComparedCase, basis: AdviceBasis) -> RuleReply | str:
    if pair.is_emulated:
        return "emulated here: its joules are the cost of emulation"
    labels: list[Label] = []
    for finding in (pair.finding, pair.reference_finding):
        labels += finding.labels if finding is not None else ()
    ratio = energy_ratio(pair.record, pair.reference, labels)
    if ratio is None and pair.record.energy is not None:
        # Measuring again on this machine would give no energy either, so no command is proposed.
        return RuleReply(AdviceRuleOutcome.NOT_MEASURED, why_no_energy(pair.record))
    if ratio is None:
        return "no energy was measured"
    interval_text = f"[{units.format_significant_digits(ratio.low)}, {units.format_significant_digits(ratio.high)}]"
    figure_text = f"{units.ratio(ratio.point)} {interval_text} of the reference's joules per step"
    if ratio.why:
        figure_text += f": {ratio.why}"
    return RuleReply(_OUTCOME_BY_ENERGY_DEMAND[ratio.demand], figure_text, (AdviceGround(pair.row, figure_text),))


def _judge_errors(pair: ComparedCase, basis: AdviceBasis) -> RuleReply | str:
    """Describes the size of each numerical error of a case. A large error rules the precision out. Only a training
    shows whether a smaller error matters.
    """
    errors = [error for error in pair.record.measurements if error.metric.endswith("_error") and error.samples]
    failure_reason = pair.record.reason if not pair.record.is_ok else ""
    # A case that failed with values that are not finite has no errors, but this answers the question.
    if NOT_FINITE in failure_reason:
        return RuleReply(AdviceRuleOutcome.NO, failure_reason, (AdviceGround(pair.row, failure_reason),))
    if failure_reason or not errors:
        return failure_reason or "no error was measured"
    figures = []
    error_size_words = set()
    for error in errors:
        size_word = describe_error_size((error.metric, sample) for sample in error.samples)
        error_size_words.add(size_word)
        error_limit_text = units.relative_error(find_metric_spec(error.metric).error_sizes[-1])
        figures.append(
            f"{size_word} {error_name(error)} ({units.relative_error(max(error.samples))}, limit {error_limit_text})"
        )
    sentence = ", ".join(figures)
    are_errors_small_enough = not error_size_words & {LARGE, NOT_FINITE} and not pair.record.not_finite
    return RuleReply(
        AdviceRuleOutcome.YES if are_errors_small_enough else AdviceRuleOutcome.NO,
        sentence,
        (AdviceGround(pair.row, sentence),),
    )


def find_study(pair: ComparedCase, basis: AdviceBasis) -> SensitivityStudy | None:
    """Returns the newest sensitivity study of the case's suite, device, precision and model; None without a study."""
    case = pair.record.case
    params = dict(case.params)
    matching_studies = []
    for study in basis.studies:
        is_same_case = (study.workload, study.low, study.device) == (case.workload, case.precision, case.device)
        # A study chooses its model by one of these two parameters.
        model = {name: value for name, value in study.params if name in ("size", "make")}
        is_same_model = {name: params.get(name, value) for name, value in model.items()} == model
        if is_same_case and is_same_model and not study.baseline.failure and study.by is not LoweredUnit.FORMAT:
            matching_studies.append(study)
    return max(matching_studies, key=lambda study: study.started, default=None)


def find_layer_trial(pair: ComparedCase, study: SensitivityStudy) -> LoweredLayersTrial:
    """Returns the study's candidate with the case's precision map, or else its first one, with all layers in low
    precision.
    """
    return next(
        (candidate for candidate in study.candidates if candidate.precision_map == pair.record.case.precision_map),
        study.candidates[0],
    )


def _judge_layers(pair: ComparedCase, basis: AdviceBasis) -> RuleReply | str | None:
    study = find_study(pair, basis)
    if (study is None and not pair.is_training) or precisions.unit_scaled(pair.record.case.precision):
        return None  # single layers of a unit-scaled model do not work in other models
    if study is None or not study.candidates:
        return "no study has lowered its layers one at a time"
    row = f"sensitivity study {study.path or study.started}"
    layer_trial = find_layer_trial(pair, study)
    loss_gap = study.gap(layer_trial)
    loss_change_text = "none" if loss_gap is None else units.change(1 + loss_gap)
    noise = "an unknown noise" if study.noise is None else f"a noise of {units.percent(study.noise)}"
    figure_text = f"layers low: {len(layer_trial.low)}, loss {loss_change_text} next to {noise} in {study.steps} steps"
    advice_grounds = (AdviceGround(row, figure_text),)
    if study.is_undecided:
        return RuleReply(AdviceRuleOutcome.UNCLEAR, f"{figure_text}: layers cannot be distinguished", advice_grounds)
    return RuleReply(
        AdviceRuleOutcome.YES if study.keeps_loss(layer_trial) else AdviceRuleOutcome.NO, figure_text, advice_grounds
    )


def find_arm(pair: ComparedCase, basis: AdviceBasis) -> ArmVerdict | None:
    """Returns the verdict on the training's arm with the precision of this case. If several arms have it, the one with
    the fewest changed settings is used.
    """
    if basis.training is None:
        return None
    arms_with_precision = [arm for arm in basis.training.verdicts.arms if arm.arm.precision == pair.mode]
    return min(arms_with_precision, key=lambda arm: len(arm.arm.settings), default=None)


_ANSWERS_BY_VERDICT = {
    LearningVerdict.WITHIN_NOISE: AdviceRuleOutcome.YES,
    LearningVerdict.BETTER: AdviceRuleOutcome.YES,
    LearningVerdict.WORSE: AdviceRuleOutcome.NO,
    LearningVerdict.DIVERGED: AdviceRuleOutcome.NO,
}


def _judge_training(pair: ComparedCase, basis: AdviceBasis) -> RuleReply | str | None:
    if not pair.is_training:
        return None
    arm = find_arm(pair, basis)
    if arm is None or basis.training is None:
        return "no training has an arm in this precision"
    figure_text = words.describe_verdict(arm, basis.training.verdicts)
    training = basis.training.stored.training
    model = training.request.settings.display_name
    advice_ground = AdviceGround(
        f"training {training.id}, arm {arm.arm.name}", f"{figure_text}, {model}, {training.request.steps} steps"
    )
    rule_outcome = (
        AdviceRuleOutcome.TOLERATED
        if arm.judged.is_tolerated
        else _ANSWERS_BY_VERDICT.get(arm.judged.learned, AdviceRuleOutcome.UNCLEAR)
    )
    return RuleReply(rule_outcome, figure_text, (advice_ground,))


# The checklist, in order.
ADVICE_RULES = (
    AdviceRule("step", AdviceQuestion.DOES_IT_PAY, "Is the whole step faster?", _judge_step_speed, "{again}"),
    AdviceRule("native", AdviceQuestion.DOES_IT_PAY, "Is it native on this device?", _judge_native, "fp8bench doctor"),
    # If products are a quarter of a step, products that are 1.6 times as fast gain 10%.
    AdviceRule("amdahl", AdviceQuestion.DOES_IT_PAY, "Would faster products alone be worthwhile?", _judge_product_share,
               "fp8bench suite ceilings{store}, then {again}"),
    # In publications, products gain 1.9 times if their operands are ready, and 1.4 times with casts.
    AdviceRule("casts", AdviceQuestion.DOES_IT_PAY, "Do the products gain more than casts cost?", _judge_cast_costs,
               "{again}"),
    # If only nn.Linear is converted, GPT-2 and ResNets gain nothing, and only 18% of Mixtral's product FLOPs are
    # converted.
    AdviceRule("coverage", AdviceQuestion.DOES_IT_PAY, "Can most of its products be converted?", _judge_coverage, ""),
    AdviceRule("energy", AdviceQuestion.DOES_IT_PAY, "Does it save energy?", _judge_energy, "{again}"),
    # Training in FP8 keeps weights and optimizer state, and adds copies: published peak memories are 1.00 times bf16's.
    AdviceRule("memory", AdviceQuestion.DOES_IT_FIT, "Does it save memory?", _judge_memory_saving, "{again}"),
    # A short training with one seed is inconclusive, because seeds differ as much as formats.
    AdviceRule("learns", AdviceQuestion.DOES_IT_LEARN, "Does it learn as well?", _judge_training, "{train}"),
    AdviceRule("errors", AdviceQuestion.DOES_IT_LEARN, "Are its errors small enough?", _judge_errors, "{again}"),
    # Published recipes keep heads, routers, first and last layers in high precision.
    AdviceRule("layers", AdviceQuestion.DOES_IT_LEARN, "Can all layers be low?", _judge_layers, "{study}"),
)  # fmt: skip
