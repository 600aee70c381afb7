"""The results of each arm of a training: the figures of its row, its energy, and verdicts on its scores.

Scores are of tasks, of users' metrics, and losses after quantising; they are paired over seeds.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from fp8bench.analysis.energy import Range, energy_samples
from fp8bench.features.train.request import TrainingRequest
from fp8bench.features.train.tasks import CHANCES, ITEMS, METRIC, TASK
from fp8bench.features.train.values import (
    BYTES_PER_PARAMETER,
    WIRE_BYTES,
    Arm,
    ArmCost,
    ArmRole,
    KeptTraining,
    StepFigure,
    StepRow,
    StreamLine,
    Training,
    TrainingEvent,
    Validation,
)
from fp8bench.features.train.verdicts.curves import (
    DECIDING,
    LEAST_PAIRS,
    Curve,
    Gap,
    JudgedArm,
    Key,
    Learned,
    Matters,
    curves_of,
    curves_of_arm,
    gap_of,
    importance,
    rule,
    seeds_until,
)
from fp8bench.features.train.verdicts.verdicts import ArmVerdict, TrainingVerdicts, verdicts_of
from fp8bench.model import EnergyUse, Interval
from fp8bench.report.columns import Col, table
from fp8bench.report.elements import Part, Text, Tone
from fp8bench.report.panels import together
from fp8bench.report.words.naming import many


@dataclass(frozen=True)
class ArmSummary:
    """The results of one arm. Losses are means over seeds: `loss` over the last tenth of the steps, `held_out` after
    the last one. `tokens_per_second` is by the median step of a native arm. Memory is that of the arm alone, for bands
    the reference's, `device_peak_memory` what it would be if hardware stores the formats. `wire` is what a rank sends
    per step, in bytes by operation and dtype. `events` is None for an arm without a step, `verdict` for the reference
    and its bands."""

    arm: Arm
    steps: int
    loss: float | None
    held_out: float | None
    tokens_per_second: float | None = None
    bytes_per_parameter: float | None = None
    peak_memory: int | None = None
    device_peak_memory: int | None = None
    wire: Mapping[str, float] = field(default_factory=dict)
    energy: TrainedEnergy | None = None
    events: int | None = None
    verdict: ArmVerdict | None = None

    @property
    def on_a_device(self) -> int | None:
        """Bytes that hardware with the formats would need for an emulated arm."""
        return None if self.arm.native else self.device_peak_memory


@dataclass(frozen=True)
class JudgedTraining:
    """A training with everything derived from its lines, computed on demand. `summaries` are of every arm, in order."""

    kept: KeptTraining

    @property
    def training(self) -> Training:
        return self.kept.training

    @property
    def request(self) -> TrainingRequest:
        return self.kept.request

    @cached_property
    def curves(self) -> dict[Key, Curve]:
        lines = self.kept.lines
        if self.training.is_watched:
            lines = tuple(map(_drop_time, lines))
        return curves_of(lines, self.training.request.steps)

    @cached_property
    def verdicts(self) -> TrainingVerdicts:
        return verdicts_of(self.training, self.kept.lines, self.curves)

    @cached_property
    def summaries(self) -> tuple[ArmSummary, ...]:
        return _summaries(self)

    @cached_property
    def scores(self) -> tuple[ScoreVerdict, ...]:
        return verdicts_of_scores(self.kept, self.verdicts)


def _drop_time(line: StreamLine) -> StreamLine:
    """Returns a line whose speed is not compared, because what else ran next to a loop is unknown."""
    return replace(line, seconds=0.0, tokens=line.tokens or 1) if isinstance(line, StepRow) else line


def _summaries(judged: JudgedTraining) -> tuple[ArmSummary, ...]:
    stored, verdicts, curves = judged.kept, judged.verdicts, judged.curves
    peaks = {line.arm: line.memory for line in stored.of(ArmCost) if line.memory is not None}
    # A user's optimizer has its state only after its first step.
    kept_bytes = {}
    for line in stored.of(ArmCost):
        if line.kept and stored.request.settings.make:
            kept_bytes[line.arm] = sum(size for _, size in line.kept) / stored.training.parameters
    reference = stored.training.arms[0].name
    energies = {line.arm: energy_of(line.energy) for line in stored.of(ArmCost) if line.energy is not None}
    events = Counter(event.arm for event in stored.of(TrainingEvent))
    # A watched step has no time.
    paces = together(
        (row.arm, row.seconds / row.tokens) for row in stored.of(StepRow) if row.seconds > 0 and row.tokens
    )
    sizes = _first_by_arm(stored, BYTES_PER_PARAMETER)
    wires = _first_by_arm(stored, WIRE_BYTES)
    summaries = []
    for arm in stored.training.arms:
        arm_curves = [*curves_of_arm(curves, arm.name).values()]
        alone = reference if arm.is_band else arm.name  # a band alone costs as much as the reference
        memory = peaks.get(alone)
        summary = ArmSummary(
            arm,
            steps=sum(len(curve.rows) for curve in arm_curves),
            loss=mean_of([curve.endpoint for curve in arm_curves if curve.whole]),
            held_out=mean_of([curve.held_out[curve.steps] for curve in arm_curves if curve.steps in curve.held_out]),
            tokens_per_second=1 / statistics.median(paces[arm.name]) if arm.native and arm.name in paces else None,
            bytes_per_parameter=kept_bytes.get(alone, sum(sizes[arm.name].values()) if arm.name in sizes else None),
            peak_memory=memory.peak if memory else None,
            device_peak_memory=memory.on_device if memory else None,
            wire=wires.get(arm.name, {}),
            energy=energies.get(arm.name),
            events=events[arm.name] if arm_curves else None,
            verdict=verdicts.of(arm.name),
        )
        summaries.append(summary)
    return tuple(summaries)


def _first_by_arm(stored: KeptTraining, name: str) -> dict[str, dict[str, float]]:
    """Returns a figure by layer, of each arm's first step that has it."""
    # Later steps send and keep the same, so the first one is enough.
    first: dict[str, tuple[tuple[int, int], dict[str, float]]] = {}
    for figure in stored.of(StepFigure):
        if figure.name == name:
            at, values = first.setdefault(figure.arm, ((figure.seed, figure.step), {}))
            if at == (figure.seed, figure.step):
                values[figure.layer] = figure.value
    return {arm: values for arm, (_, values) in first.items()}


def mean_of(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def figures_of(summary: ArmSummary, verdicts: TrainingVerdicts) -> dict[str, float | None]:
    """Returns the figures of an arm. Gaps are of the last third of the steps; they have their interval of 95%,
    'gap_deciding' that of 99%. A band is a figure of the arm that shows it."""
    verdict = summary.verdict
    energy = summary.energy
    speed = verdict.speed.adjusted if verdict and verdict.speed else None
    return {
        "loss": summary.loss,
        "held_out": summary.held_out,
        **gap_figures("gap", verdict.judged.gap if verdict else None),
        **gap_figures("held_out_gap", verdict.judged.held_out if verdict else None),
        "tokens_per_second": summary.tokens_per_second,
        **_interval("speed_to_same_loss", speed),
        "bytes_per_parameter": summary.bytes_per_parameter,
        "peak_memory": summary.peak_memory,
        "device_peak_memory": summary.device_peak_memory,
        "wire_bytes": math.fsum(summary.wire.values()) if summary.wire else None,
        "joules_per_step": energy.joules.middle if energy and energy.joules else None,
        "events": summary.events,
        **_band(summary.arm, verdicts),
    }


def gap_figures(name: str, gap: Gap | None) -> dict[str, float | None]:
    if gap is None:
        return {**_interval(name, None), **_interval(f"{name}_deciding", None), f"{name}_pairs": None}
    ends = {**_interval(name, gap.shown), **_interval(f"{name}_deciding", gap.decides)}
    return {**ends, name: gap.point, f"{name}_pairs": gap.pairs}


def _interval(name: str, interval: Interval | None) -> dict[str, float | None]:
    point, low, high = (interval.point, interval.low, interval.high) if interval else (None, None, None)
    return {name: point, f"{name}_low": low, f"{name}_high": high}


def _band(arm: Arm, verdicts: TrainingVerdicts) -> dict[str, float | None]:
    if arm.role is ArmRole.REPEAT and verdicts.repeat_band is not None:
        return {"first_difference": verdicts.repeat_band.first, "largest_difference": verdicts.repeat_band.largest}
    return {}


@dataclass(frozen=True)
class TrainedEnergy:
    """`joules` are those of a step, by its windows; `why` is the reason if they are missing."""

    joules: Range | None
    why: str = ""


def energy_of(use: EnergyUse) -> TrainedEnergy:
    samples = energy_samples(use)
    if not samples:
        return TrainedEnergy(None, use.why or "no window was measured, for unknown reasons")
    return TrainedEnergy(Range(statistics.median(samples), min(samples), max(samples)), use.why)


@dataclass(frozen=True)
class ScoreVerdict:
    """An arm's figure compared with the reference's, on average over seeds: `worse` is in points of a task, else a
    share, paired over seeds, with the interval of 99%."""

    arm: str
    figure: str
    against: str
    reference: float = math.nan
    own: float = math.nan
    worse: Gap | None = None
    word: str = ""
    learned: Learned | None = None
    matters: Matters | None = None


# Values by seed.
_Values = Mapping[int, float]
_AT_CHANCE = "at chance, like the reference: it shows nothing about precisions"
_IN_BF16 = "quantised:bf16"


def verdicts_of_scores(stored: KeptTraining, verdicts: TrainingVerdicts) -> tuple[ScoreVerdict, ...]:
    """Compares with the reference's scores; the reference's own quantised weights with these in bf16."""
    scores: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for line in stored.of(StepFigure):
        if line.name.startswith((TASK, METRIC)):
            scores[line.name][line.arm][line.seed] = line.value
    steps = stored.request.steps
    for look in stored.of(Validation):
        if look.of.startswith("quantised:") and look.step == steps:
            scores[look.of][look.arm][look.seed] = look.loss
    in_bf16 = dict(scores.get(_IN_BF16, {}))
    base, request, scored = verdicts.reference, stored.request, []
    for name, values in scores.items():
        for arm in stored.training.compared_arms:
            if arm.name != base:
                verdict = ScoreVerdict(arm.name, name, base)
                scored.append(_verdict(request, verdict, values[arm.name], values[base]))
            elif name.startswith("quantised:") and name != _IN_BF16:
                verdict = ScoreVerdict(arm.name, name, "itself in bf16")
                scored.append(_verdict(request, verdict, values[arm.name], in_bf16.get(arm.name, {})))
    return tuple(filter(None, scored))


def _verdict(
    request: TrainingRequest, verdict: ScoreVerdict, values: _Values, old_values: _Values
) -> ScoreVerdict | None:
    """Returns the verdict; None if no seed has both."""
    both = [(values[seed], old_values[seed]) for seed in values if seed in old_values]
    pairs, name = [pair for pair in both if math.isfinite(sum(pair))], verdict.figure
    if not pairs:
        return None
    new, old = zip(*pairs, strict=True)
    verdict = replace(verdict, reference=math.fsum(old) / len(pairs), own=math.fsum(new) / len(pairs))
    if name.startswith(TASK):
        # No difference in this many questions bounds the true one: at 99% by 4.6 over their number.
        floor = -math.log(1 - DECIDING) / (ITEMS * len(pairs))
        chance = CHANCES[name.removeprefix(TASK).partition("@")[0]]
        worse = _widen(gap_of([before - after for after, before in pairs]), floor)
        learned = _is_above(new, chance, floor) or _is_above(old, chance, floor)
        return _judge_score(verdict, worse, request.margin, at_chance=not learned)
    if min(old) <= 0:
        return replace(verdict, word="open: there is no share of a reference that is not above 0")
    sign = -1 if name.startswith(METRIC) and not _lower_is_better(request, name) else 1
    return _judge_score(verdict, gap_of([sign * (after / before - 1) for after, before in pairs]), request.margin)


def _is_above(scores: Sequence[float], chance: float, floor: float) -> bool:
    """Whether the scores of all seeds together are certainly above chance."""
    gap = _widen(gap_of([score - chance for score in scores]), floor)
    return gap is not None and gap.decides is not None and gap.decides.low > 0


def _lower_is_better(request: TrainingRequest, name: str) -> bool:
    figure = name.removeprefix(METRIC)
    lower = [metric.removesuffix("=lower") for metric in request.settings.metric if metric.endswith("=lower")]
    return any(figure in (metric, f"{metric}.{figure.removeprefix(f'{metric}.')}") for metric in lower)


def _widen(gap: Gap | None, floor: float) -> Gap | None:
    """Widens an interval to what this many questions resolve: no difference in them bounds that of all."""
    if gap is None or gap.decides is None or gap.decides.high - gap.point >= floor:
        return gap
    return replace(gap, decides=Interval(gap.point, gap.point - floor, gap.point + floor, gap.decides.level))


def _judge_score(verdict: ScoreVerdict, gap: Gap | None, margin: float, at_chance: bool = False) -> ScoreVerdict:
    verdict = replace(verdict, worse=gap, word=still_open(gap, margin))
    if gap is None or gap.decides is None or gap.pairs < LEAST_PAIRS:
        return verdict
    if at_chance:
        return replace(verdict, word=_AT_CHANCE)
    learned, matters = rule(gap.decides, margin), importance(gap.decides, margin)
    verdict = replace(verdict, learned=learned, matters=matters)
    if learned is Learned.INCONCLUSIVE:
        return verdict
    within = learned is Learned.WITHIN_NOISE
    return replace(
        verdict, word=learned.value if within else f"{learned}: {describe_importance(learned, matters, margin)}"
    )


def still_open(gap: Gap | None, bound: float) -> str:
    """Returns 'open: 3 seeds of the 5 that are needed', or how many more would settle a share of `bound`."""
    if gap is None or gap.pairs < LEAST_PAIRS:
        return f"open: {many(gap.pairs if gap else 0, 'seed')} of the {LEAST_PAIRS} that are needed"
    count = seeds_until(gap, bound)
    seeds = "an unknown number of more seeds" if count is None else many(count, "more seed")
    return f"open: {seeds} would settle {100 * bound:g}%"


_HOW: Mapping[Matters | None, str] = {Matters.NO: "inside", Matters.YES: "all of it beyond"}


def describe_importance(learned: Learned, matters: Matters | None, margin: float) -> str:
    """Returns the meaning of a difference, such as 'real, inside the 1% you tolerate'."""
    limit = f"{100 * margin:.4g}%"
    return f"real, {_HOW.get(matters, 'perhaps beyond')} " + (
        f"the {limit} you tolerate" if learned is Learned.WORSE else f"the margin of {limit}"
    )


_TONES: Mapping[Learned | None, Tone] = {
    Learned.DIVERGED: Tone.BAD,
    Learned.WORSE: Tone.BAD,
    Learned.BETTER: Tone.GOOD,
    Learned.WITHIN_NOISE: Tone.GOOD,
}


def tone_of(verdict: JudgedArm | ScoreVerdict) -> Tone:
    """Returns green if nothing is lost, red if something is, yellow if it is open or tolerated."""
    tolerated = verdict.learned is Learned.WORSE and verdict.matters is Matters.NO
    return Tone.DOUBT if tolerated else _TONES.get(verdict.learned, Tone.DOUBT)


def score_parts(rows: Sequence[ScoreVerdict]) -> Iterator[Part]:
    cols: list[Col[ScoreVerdict]] = [
        Col("arm", lambda verdict: verdict.arm),
        Col("figure", lambda verdict: verdict.figure),
        Col("value", lambda verdict: verdict.own, show=_four),
        Col("against", lambda verdict: verdict.against),
        Col("its value", lambda verdict: verdict.reference, show=_four),
        Col("worse by", _worse, number=True, hint="points of a task, else a share; with the 99% interval over seeds"),
        Col("verdict", lambda verdict: verdict.word, tone=tone_of),
    ]
    scored_tasks = {row.figure.removeprefix(TASK).partition("@")[0] for row in rows}
    tasks = [task for task in CHANCES if task in scored_tasks]
    chances = ", ".join(f"{task} {100 * CHANCES[task]:.3g}%" for task in tasks)
    words = [Text(f"By chance alone answers are right in: {chances}.")] if tasks else []
    scored = any(not row.figure.startswith("quantised:") for row in rows)
    title = "Scores, and losses after quantising" if scored else "Losses after quantising"
    if rows:
        yield Part("scores", title, (table("scores", "", cols, rows), *words))


def _four(value: float) -> str:
    return f"{value:.4g}"


def _worse(verdict: ScoreVerdict) -> str | None:
    if verdict.worse is None:
        return None
    unit, ends = " points" if verdict.figure.startswith(TASK) else "%", verdict.worse.decides
    span = f" [{100 * ends.low:+.2g}, {100 * ends.high:+.2g}]" if ends else ""
    return f"{100 * verdict.worse.point:+.2g}{span}{unit}"
