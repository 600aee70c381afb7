"""The results of each arm of a training, which is one way to train the model: the figures of its row, its energy, and
the verdicts on its scores. Scores are the results of tasks and of users' metrics, and also losses after quantising.
They are compared seed by seed.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from fp8bench.analysis.energy import WindowRange, energy_samples
from fp8bench.features.train.request import TrainingRequest
from fp8bench.features.train.tasks import CHANCE_SCORES, METRIC_PREFIX, QUESTION_COUNT, TASK_PREFIX
from fp8bench.features.train.values import (
    BYTES_PER_PARAMETER,
    WIRE_BYTES,
    Arm,
    ArmCost,
    ArmRole,
    Lines,
    StepFigure,
    StepRow,
    StoredTraining,
    Training,
    TrainingEvent,
    Validation,
)
from fp8bench.features.train.verdicts.curves import (
    DECIDING_CONFIDENCE_LEVEL,
    MIN_PAIRS,
    ArmAndSeed,
    DifferenceImportance,
    JudgedArm,
    LearningVerdict,
    LossCurve,
    LossGap,
    average_gaps,
    classify_importance,
    classify_loss_gap,
    count_further_seeds,
    find_deciding_interval,
    make_curves,
    select_curves,
)
from fp8bench.features.train.verdicts.verdicts import ArmVerdict, TrainingVerdicts, judge_training
from fp8bench.model import EnergyUse, Interval
from fp8bench.report.columns import Col, table
from fp8bench.report.elements import Part, Text, Tone
from fp8bench.report.panels import together
from fp8bench.report.words.naming import many


@dataclass(frozen=True)
class ArmSummary:
    """The results of one arm. Losses are means over seeds: `loss` over the last tenth of the steps, and `held_out`
    after the last step. `tokens_per_second` is computed from the median step; None for an emulated arm. Memory is
    measured while no other arm is loaded. An arm that repeats the reference has the reference's memory figures.
    `device_peak_memory` is the peak on hardware that stores the arm's formats. `wire` has the bytes that a rank sends
    per step, by operation and dtype. `events` is None for an arm that has no step yet. `verdict` is None for the
    reference and the arms that repeat it.
    """

    arm: Arm
    steps: int
    loss: float | None
    held_out: float | None
    tokens_per_second: float | None = None
    bytes_per_parameter: float | None = None
    peak_memory: int | None = None
    device_peak_memory: int | None = None
    wire: Mapping[str, float] = field(default_factory=dict)
    joules_per_step: WindowRange | None = None
    events: int | None = None
    verdict: ArmVerdict | None = None

    @property
    def on_a_device(self) -> int | None:
        """Returns the bytes that an emulated arm would need on hardware with its formats; None for a native arm."""
        return None if self.arm.native else self.device_peak_memory


@dataclass(frozen=True)
class JudgedTraining:
    """A training with the results that are computed from its stored lines. Each result is computed when it is first
    read. `summaries` has an entry for every arm, in the order of arms.
    """

    stored: StoredTraining

    @property
    def training(self) -> Training:
        return self.stored.training

    @property
    def request(self) -> TrainingRequest:
        return self.stored.request

    @cached_property
    def curves(self) -> dict[ArmAndSeed, LossCurve]:
        lines: Lines = self.stored.lines
        if self.training.is_watched:
            # The arms are users' loops, which were recorded separately. Drop the times of all steps, because other
            # programs may have run next to one of the loops. A loop without a declared number of tokens has 0 tokens,
            # which count as 1.
            lines = [
                replace(line, seconds=0.0, tokens=line.tokens or 1) if isinstance(line, StepRow) else line
                for line in lines
            ]
        return make_curves(lines, self.request.steps)

    @cached_property
    def verdicts(self) -> TrainingVerdicts:
        return judge_training(self.training, self.stored.lines, self.curves)

    @cached_property
    def summaries(self) -> tuple[ArmSummary, ...]:
        return _summarise_arms(self)

    @cached_property
    def scores(self) -> tuple[ScoreVerdict, ...]:
        return compare_scores_with_reference(self.stored, self.verdicts)


def _summarise_arms(judged: JudgedTraining) -> tuple[ArmSummary, ...]:
    training = judged.training
    arm_costs = judged.stored.select_lines(ArmCost)
    memory_by_arm = {cost.arm: cost.memory for cost in arm_costs if cost.memory is not None}
    energies = {cost.arm: cost.energy for cost in arm_costs if cost.energy is not None}
    bytes_per_parameter: dict[str, float] = {}
    for figure in _list_first_figures(judged.stored, BYTES_PER_PARAMETER):
        bytes_per_parameter[figure.arm] = bytes_per_parameter.get(figure.arm, 0.0) + figure.value
    # `make` names a user's function that makes the model. A user's optimizer has no state before its first step. So the
    # bytes come from the measurement of memory, which takes steps.
    if judged.request.settings.make:
        for cost in arm_costs:
            bytes_by_purpose = cost.kept
            if bytes_by_purpose:
                bytes_per_parameter[cost.arm] = sum(size for _purpose, size in bytes_by_purpose) / training.parameters
    wire_bytes_by_arm: dict[str, dict[str, float]] = defaultdict(dict)
    for figure in _list_first_figures(judged.stored, WIRE_BYTES):
        operation_and_dtype = figure.layer
        wire_bytes_by_arm[figure.arm][operation_and_dtype] = figure.value
    events = Counter(event.arm for event in judged.stored.select_lines(TrainingEvent))
    rows = judged.stored.select_lines(StepRow)
    # A row has 0 seconds if the tensors of its step were measured, which slows the step down.
    seconds_per_token_by_arm = together(
        (row.arm, row.seconds / row.tokens) for row in rows if row.seconds > 0 and row.tokens
    )
    summaries = []
    for arm in training.arms:
        arm_curves = select_curves(judged.curves, arm.name).values()
        measured_arm = training.arms[0].name if arm.is_chance_arm else arm.name
        memory = memory_by_arm.get(measured_arm)
        summary = ArmSummary(
            arm,
            steps=sum(len(curve.rows) for curve in arm_curves),
            loss=_average_or_none([curve.endpoint for curve in arm_curves if curve.is_complete]),
            held_out=_average_or_none(
                [curve.held_out[curve.steps] for curve in arm_curves if curve.steps in curve.held_out]
            ),
            tokens_per_second=1 / statistics.median(seconds_per_token_by_arm[arm.name])
            if arm.native and arm.name in seconds_per_token_by_arm
            else None,
            bytes_per_parameter=bytes_per_parameter.get(measured_arm),
            peak_memory=memory.peak if memory else None,
            device_peak_memory=memory.on_device if memory else None,
            wire=wire_bytes_by_arm[arm.name],
            joules_per_step=summarise_energy(energies.get(arm.name)),
            events=events[arm.name] if arm_curves else None,
            verdict=judged.verdicts.find_verdict(arm.name),
        )
        summaries.append(summary)
    return tuple(summaries)


def _list_first_figures(stored: StoredTraining, name: str) -> Iterator[StepFigure]:
    """Yields, for each arm, the figures called `name` of the first step that has any. In later steps their values are
    the same.
    """
    first_step_by_arm: dict[str, tuple[int, int]] = {}
    for figure in stored.select_lines(StepFigure):
        step = figure.seed, figure.step
        if figure.name == name and first_step_by_arm.setdefault(figure.arm, step) == step:
            yield figure


def _average_or_none(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def list_figures(summary: ArmSummary, verdicts: TrainingVerdicts) -> dict[str, float | None]:
    """Returns the figures of an arm by name. Gaps are over the last third of the steps, with their 95% interval;
    'gap_deciding' has the 99% interval. Instead of gaps, a repeat of the reference has the first step whose loss
    differs from the reference's, and the largest difference.
    """
    verdict = summary.verdict
    repeat_band = verdicts.repeat_band if summary.arm.role is ArmRole.REPEAT else None
    speed_to_same_loss = verdict.speed.adjusted if verdict and verdict.speed else None
    return {
        "loss": summary.loss,
        "held_out": summary.held_out,
        **list_gap_figures("gap", verdict.judged.gap if verdict else None),
        **list_gap_figures("held_out_gap", verdict.judged.held_out if verdict else None),
        "tokens_per_second": summary.tokens_per_second,
        **_list_interval_figures("speed_to_same_loss", speed_to_same_loss),
        "bytes_per_parameter": summary.bytes_per_parameter,
        "peak_memory": summary.peak_memory,
        "device_peak_memory": summary.device_peak_memory,
        "wire_bytes": math.fsum(summary.wire.values()) if summary.wire else None,
        "joules_per_step": summary.joules_per_step.middle if summary.joules_per_step else None,
        "events": summary.events,
        **({"first_difference": repeat_band.first, "largest_difference": repeat_band.largest} if repeat_band else {}),
    }


def list_gap_figures(name: str, gap: LossGap | None) -> dict[str, float | None]:
    if gap is None:
        return {
            **_list_interval_figures(name, None),
            **_list_interval_figures(f"{name}_deciding", None),
            f"{name}_pairs": None,
        }
    return {
        **_list_interval_figures(name, gap.shown),
        # Replace the point of the interval, because a single seed has a point but no interval.
        name: gap.point,
        **_list_interval_figures(f"{name}_deciding", gap.decides),
        f"{name}_pairs": gap.pairs,
    }


def _list_interval_figures(name: str, interval: Interval | None) -> dict[str, float | None]:
    point, low, high = (interval.point, interval.low, interval.high) if interval else (None, None, None)
    return {name: point, f"{name}_low": low, f"{name}_high": high}


def summarise_energy(use: EnergyUse | None) -> WindowRange | None:
    """Returns the joules of a training step, measured in windows of many steps; None without a window."""
    samples = energy_samples(use)
    return WindowRange(statistics.median(samples), min(samples), max(samples)) if samples else None


@dataclass(frozen=True)
class ScoreVerdict:
    """The verdict on an arm's score. `own` is the score, and `reference` the score that it is compared with: both are
    means over seeds. `worse` is their difference, paired over seeds, with a 99% interval: in points for a task, and
    otherwise as a share. `learned` is whether the arm is worse or better, and `matters` is whether the difference
    exceeds the margin. Both are None without an interval, or if all scores are at chance.
    """

    arm: str
    figure: str
    against: str
    reference: float = math.nan
    own: float = math.nan
    worse: LossGap | None = None
    word: str = ""
    learned: LearningVerdict | None = None
    matters: DifferenceImportance | None = None


# the scores of an arm by seed
_ScoresBySeed = Mapping[int, float]
_CHANCE_LEVEL_TEXT = "at chance, like the reference: it shows nothing about precisions"
_QUANTISED_PREFIX = "quantised:"
# The reference's loss in bf16. Its losses after quantising to other formats are compared with this loss.
_QUANTISED_BF16_FIGURE = f"{_QUANTISED_PREFIX}bf16"


def compare_scores_with_reference(stored: StoredTraining, verdicts: TrainingVerdicts) -> tuple[ScoreVerdict, ...]:
    """Compares the scores of arms with the reference's scores. Also compares the losses of the quantised reference with
    the loss of the reference in bf16.
    """
    # 1. Collect the scores by name, arm and seed.
    scores: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for line in stored.select_lines(StepFigure):
        if line.name.startswith((TASK_PREFIX, METRIC_PREFIX)):
            scores[line.name][line.arm][line.seed] = line.value
    steps = stored.request.steps
    for validation in stored.select_lines(Validation):
        if validation.of.startswith(_QUANTISED_PREFIX) and validation.step == steps:
            scores[validation.of][validation.arm][validation.seed] = validation.loss
    # 2. Compare each arm with the reference, and the quantised reference with its loss in bf16.
    bf16_losses = dict(scores.get(_QUANTISED_BF16_FIGURE, {}))
    reference = verdicts.reference
    request = stored.request
    score_verdicts = []
    for name, values in scores.items():
        for arm in stored.training.compared_arms:
            if arm.name != reference:
                comparison_words = reference
                compared_values = values[reference]
            # This arm is the reference.
            elif name.startswith(_QUANTISED_PREFIX) and name != _QUANTISED_BF16_FIGURE:
                comparison_words = "itself in bf16"
                compared_values = bf16_losses.get(arm.name, {})
            else:
                continue
            verdict = ScoreVerdict(arm.name, name, comparison_words)
            score_verdicts.append(_make_score_verdict(request, verdict, values[arm.name], compared_values))
    return tuple(filter(None, score_verdicts))


def _make_score_verdict(
    request: TrainingRequest, verdict: ScoreVerdict, arm_values: _ScoresBySeed, reference_values: _ScoresBySeed
) -> ScoreVerdict | None:
    """Completes the verdict on an arm's score. `arm_values` are the arm's scores by seed, and `reference_values` the
    scores to compare with. Returns None if no seed has finite scores of both.
    """
    score_pairs = [(score, reference_values[seed]) for seed, score in arm_values.items() if seed in reference_values]
    finite_score_pairs = [pair for pair in score_pairs if math.isfinite(sum(pair))]
    name = verdict.figure
    if not finite_score_pairs:
        return None
    arm_scores, reference_scores = zip(*finite_score_pairs, strict=True)
    seed_count = len(finite_score_pairs)
    verdict = replace(
        verdict, reference=math.fsum(reference_scores) / seed_count, own=math.fsum(arm_scores) / seed_count
    )
    if name.startswith(TASK_PREFIX):
        # If two arms answer n questions equally, their true scores differ by at most 4.6 / n, with 99% confidence. Here
        # n counts the questions of all seeds.
        floor = -math.log(1 - DECIDING_CONFIDENCE_LEVEL) / (QUESTION_COUNT * seed_count)
        chance_score = CHANCE_SCORES[_find_task(name)]
        score_declines = [reference_score - arm_score for arm_score, reference_score in finite_score_pairs]
        score_gap = _widen_gap_interval(average_gaps(score_declines), floor)
        has_learned = _are_scores_above_chance(arm_scores, chance_score, floor) or _are_scores_above_chance(
            reference_scores, chance_score, floor
        )
        return _judge_arm_score(verdict, score_gap, request.margin, at_chance=not has_learned)
    if min(reference_scores) <= 0:
        return replace(
            verdict, word="open: the reference's score is not above 0, so that no relative difference exists"
        )
    # A higher metric is better unless the user declared `=lower`. A loss after quantising is better if it is lower.
    worsening_sign = -1 if name.startswith(METRIC_PREFIX) and not _lower_is_better(request, name) else 1
    relative_declines = [
        worsening_sign * (arm_score / reference_score - 1) for arm_score, reference_score in finite_score_pairs
    ]
    return _judge_arm_score(verdict, average_gaps(relative_declines), request.margin)


def _find_task(figure: str) -> str:
    """Returns the task of a score: 'retrieval' for 'task:retrieval@64'. The number is the length of the questions."""
    return figure.removeprefix(TASK_PREFIX).partition("@")[0]


def _are_scores_above_chance(scores: Sequence[float], chance: float, floor: float) -> bool:
    """Returns whether the scores are certainly above chance. The interval of their mean over seeds has at least the
    half-width `floor`.
    """
    gap = _widen_gap_interval(average_gaps([score - chance for score in scores]), floor)
    return gap is not None and gap.decides is not None and gap.decides.low > 0


def _lower_is_better(request: TrainingRequest, name: str) -> bool:
    metric_name = name.removeprefix(METRIC_PREFIX)
    minimised_metrics = [
        metric.removesuffix("=lower") for metric in request.settings.metric if metric.endswith("=lower")
    ]
    # A metric that returns several results has one figure for each: the metric's name, a dot and the result's name.
    return any(metric_name == metric or metric_name.startswith(f"{metric}.") for metric in minimised_metrics)


def _widen_gap_interval(gap: LossGap | None, floor: float) -> LossGap | None:
    """Returns the gap with an interval that reaches at least `floor` to each side. Equal answers to a task's few
    questions cannot rule out a true difference of up to `floor`.
    """
    if gap is None or gap.decides is None or gap.decides.high - gap.point >= floor:
        return gap
    return replace(gap, decides=Interval(gap.point, gap.point - floor, gap.point + floor, gap.decides.level))


def _judge_arm_score(
    verdict: ScoreVerdict, gap: LossGap | None, margin: float, at_chance: bool = False
) -> ScoreVerdict:
    verdict = replace(verdict, worse=gap)
    undecided_text = describe_undecided_gap(gap, margin)
    interval = find_deciding_interval(gap)
    if interval is None:
        return replace(verdict, word=undecided_text)
    if at_chance:
        return replace(verdict, word=_CHANCE_LEVEL_TEXT)
    learning_verdict = classify_loss_gap(interval, margin)
    gap_importance = classify_importance(interval, margin)
    verdict = replace(verdict, learned=learning_verdict, matters=gap_importance)
    if learning_verdict is LearningVerdict.INCONCLUSIVE:
        return replace(verdict, word=undecided_text)
    if learning_verdict is LearningVerdict.WITHIN_NOISE:
        return replace(verdict, word=learning_verdict.value)
    return replace(verdict, word=f"{learning_verdict}: {describe_importance(learning_verdict, gap_importance, margin)}")


def describe_undecided_gap(gap: LossGap | None, bound: float) -> str:
    """Returns a text about an undecided gap, such as 'open: 3 seeds of the 5 that are needed'. If enough seeds were
    trained, the text has the number of further seeds that would settle a comparison with the margin `bound`.
    """
    if gap is None or gap.pairs < MIN_PAIRS:
        return f"open: {many(gap.pairs if gap else 0, 'seed')} of the {MIN_PAIRS} that are needed"
    seed_count = count_further_seeds(gap, bound)
    seeds = "an unknown number of more seeds" if seed_count is None else many(seed_count, "more seed")
    return f"open: {seeds} would settle {100 * bound:g}%"


_IMPORTANCE_WORDS: Mapping[DifferenceImportance | None, str] = {
    DifferenceImportance.NO: "inside",
    DifferenceImportance.YES: "all of it beyond",
}


def describe_importance(learned: LearningVerdict, matters: DifferenceImportance | None, margin: float) -> str:
    """Returns how a statistically certain difference compares with the margin, such as 'real, inside the 1% you
    tolerate'.
    """
    margin_text = f"{100 * margin:.4g}%"
    margin_words = (
        f"the {margin_text} you tolerate" if learned is LearningVerdict.WORSE else f"the margin of {margin_text}"
    )
    return f"real, {_IMPORTANCE_WORDS.get(matters, 'perhaps beyond')} {margin_words}"


_TONE_BY_VERDICT: Mapping[LearningVerdict | None, Tone] = {
    LearningVerdict.DIVERGED: Tone.BAD,
    LearningVerdict.WORSE: Tone.BAD,
    LearningVerdict.BETTER: Tone.GOOD,
    LearningVerdict.WITHIN_NOISE: Tone.GOOD,
}


def find_verdict_tone(verdict: JudgedArm | ScoreVerdict) -> Tone:
    """Returns the colour of a verdict: green if nothing is lost, red if something is lost, and yellow if the verdict is
    undecided or the loss is tolerated.
    """
    is_loss_tolerated = verdict.learned is LearningVerdict.WORSE and verdict.matters is DifferenceImportance.NO
    return Tone.DOUBT if is_loss_tolerated else _TONE_BY_VERDICT.get(verdict.learned, Tone.DOUBT)


def render_scores(rows: Sequence[ScoreVerdict]) -> Iterator[Part]:
    columns: list[Col[ScoreVerdict]] = [
        Col("arm", "arm"),
        Col("figure", "figure"),
        Col("value", "own", show="{:.4g}".format),
        Col("against", "against"),
        Col("its value", "reference", show="{:.4g}".format),
        Col(
            "worse by",
            _format_score_decline,
            number=True,
            hint="in points for tasks, in percent otherwise; with the 99% interval over seeds",
        ),
        Col("verdict", "word", tone=find_verdict_tone),
    ]
    # A score means little without the score of guessing, so print that too.
    scored_task_names = {_find_task(row.figure) for row in rows}
    tasks_with_chance_score = [task for task in CHANCE_SCORES if task in scored_task_names]
    chance_scores_text = ", ".join(f"{task} {100 * CHANCE_SCORES[task]:.3g}%" for task in tasks_with_chance_score)
    texts = [Text(f"By chance alone answers are right in: {chance_scores_text}.")] if tasks_with_chance_score else []
    has_scores = any(not row.figure.startswith(_QUANTISED_PREFIX) for row in rows)
    title = "Scores, and losses after quantising" if has_scores else "Losses after quantising"
    if rows:
        yield Part("scores", title, (table("scores", "", columns, rows), *texts))


def _format_score_decline(verdict: ScoreVerdict) -> str | None:
    if verdict.worse is None:
        return None
    unit = " points" if verdict.figure.startswith(TASK_PREFIX) else "%"
    interval = verdict.worse.decides
    interval_text = f" [{100 * interval.low:+.2g}, {100 * interval.high:+.2g}]" if interval else ""
    return f"{100 * verdict.worse.point:+.2g}{interval_text}{unit}"
