"""What is said of scores: of tasks, of metrics of somebody's own, and of losses after quantising; paired over seeds."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from fp8bench.features.train.request import TrainingRequest
from fp8bench.features.train.tasks import CHANCES, ITEMS, METRIC, TASK
from fp8bench.features.train.values import KeptTraining, StepFigure, Validation
from fp8bench.features.train.verdicts.curves import (
    DECIDING,
    LEAST_PAIRS,
    Gap,
    Learned,
    arrivals,
    gap_of,
    rule,
    seeds_until,
)
from fp8bench.features.train.verdicts.verdicts import TrainingVerdicts
from fp8bench.model import Interval
from fp8bench.report.columns import Col, table
from fp8bench.report.elements import Part, Text, Tone
from fp8bench.report.words.naming import many


@dataclass(frozen=True)
class ScoreVerdict:
    """An arm's figure beside the reference's, in the mean over seeds: `worse` by points of what was asked, or by a
    share of a loss or of a metric, paired over seeds; with the interval of 99%."""

    arm: str
    figure: str
    against: str
    reference: float = math.nan
    own: float = math.nan
    worse: Gap | None = None
    word: str = ""
    learned: Learned | None = None


# Values by seed.
_Values = Mapping[int, float]
_AT_CHANCE = "at chance, as the reference: it says nothing of precisions"
_IN_BF16 = "quantised:bf16"


def verdicts_of_scores(kept: KeptTraining, found: TrainingVerdicts) -> tuple[ScoreVerdict, ...]:
    """Of every task, metric and quantised look that arms have: beside the reference's, of the reference's own weights
    quantised beside these in bf16."""
    scores: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for line in kept.of(StepFigure):
        if line.name.startswith((TASK, METRIC)):
            scores[line.name][line.arm][line.seed] = line.value
    steps, ends = kept.training.request.steps, arrivals(kept.lines)
    for look in kept.of(Validation):
        if look.of.startswith("quantised:") and look.step == ends.get(look.seed, steps):
            scores[look.of][look.arm][look.seed] = look.loss
    in_bf16 = dict(scores.get(_IN_BF16, {}))
    base, request, made = found.reference, kept.training.request, []
    for name, values in scores.items():
        for arm in (arm.name for arm in kept.training.arms if not arm.skip and not arm.is_band):
            if arm != base:
                made.append(_verdict(request, ScoreVerdict(arm, name, base), values[arm], values[base]))
            elif name.startswith("quantised:") and name != _IN_BF16:
                told = ScoreVerdict(arm, name, "itself in bf16")
                made.append(_verdict(request, told, values[arm], in_bf16.get(arm, {})))
    return tuple(verdict for verdict in made if verdict is not None)


def _verdict(request: TrainingRequest, told: ScoreVerdict, values: _Values, others: _Values) -> ScoreVerdict | None:
    """None where no seed has both."""
    both = [(values[seed], others[seed]) for seed in values if seed in others]
    pairs, name = [pair for pair in both if math.isfinite(sum(pair))], told.figure
    if not pairs:
        return None
    own, old = ([pair[place] for pair in pairs] for place in (0, 1))
    told = replace(told, reference=math.fsum(old) / len(pairs), own=math.fsum(own) / len(pairs))
    if name.startswith(TASK):
        floor = -math.log(1 - DECIDING) / (ITEMS * len(pairs))
        chance = CHANCES[name.removeprefix(TASK).partition("@")[0]]
        above = [_widened(gap_of([value - chance for value in some]), floor) for some in (own, old)]
        return _judged(told, _widened(gap_of([before - new for new, before in pairs]), floor), request.margin,
                       not any(gap and gap.decides and gap.decides.low > 0 for gap in above))  # fmt: skip
    if min(old) <= 0:
        return replace(told, word="open: no share of a reference that is not above 0")
    falls = name.startswith(METRIC) and not _lower_is_better(request, name)
    return _judged(told, gap_of([(new / before - 1) * (-1 if falls else 1) for new, before in pairs]), request.margin)


def _lower_is_better(request: TrainingRequest, name: str) -> bool:
    own = name.removeprefix(METRIC)
    lower = [metric.removesuffix("=lower") for metric in request.settings.metric if metric.endswith("=lower")]
    return any(own in (metric, f"{metric}.{own.removeprefix(f'{metric}.')}") for metric in lower)


def _widened(gap: Gap | None, floor: float) -> Gap | None:
    """No narrower than so many questions can tell: where none was answered otherwise, fewer than so many of all are."""
    if gap is None or gap.decides is None or gap.decides.high - gap.point >= floor:
        return gap
    return replace(gap, decides=Interval(gap.point, gap.point - floor, gap.point + floor, gap.decides.level))


def _judged(told: ScoreVerdict, gap: Gap | None, margin: float, at_chance: bool = False) -> ScoreVerdict:
    if gap is None or gap.decides is None or gap.pairs < LEAST_PAIRS:
        pairs = gap.pairs if gap else 0
        return replace(told, worse=gap, word=f"open: {many(pairs, 'seed')} of {LEAST_PAIRS} that are needed")
    if at_chance:
        return replace(told, worse=gap, word=_AT_CHANCE)
    learned = rule(gap.decides, margin)
    if learned is Learned.INCONCLUSIVE:
        more = seeds_until(gap, margin)
        word = f"open: {'no number of seeds that is known' if more is None else many(more, 'more seed')} would settle"
        return replace(told, worse=gap, word=f"{word} {100 * margin:g}", learned=learned)
    return replace(told, worse=gap, word=learned.value, learned=learned)


_TONES: Mapping[Learned | None, Tone] = {
    Learned.WORSE: Tone.BAD,
    Learned.BETTER: Tone.GOOD,
    Learned.WITHIN_NOISE: Tone.GOOD,
}


def score_parts(kept: KeptTraining, found: TrainingVerdicts) -> Iterator[Part]:
    """A row for each arm and figure; what was not learnt says so."""
    rows = verdicts_of_scores(kept, found)
    cols: list[Col[ScoreVerdict]] = [
        Col("arm", lambda verdict: verdict.arm), Col("figure", lambda verdict: verdict.figure),
        Col("value", lambda verdict: verdict.own, number=True, show=_four),
        Col("against", lambda verdict: verdict.against),
        Col("its value", lambda verdict: verdict.reference, number=True, show=_four),
        Col("worse by", _worse, number=True, hint="points of a task, else a share; with the 99% interval over seeds"),
        Col("verdict", lambda verdict: verdict.word, tone=lambda verdict: _TONES.get(verdict.learned, Tone.DOUBT)),
    ]  # fmt: skip
    asked = [task for task in CHANCES if any(row.figure.startswith(TASK + task) for row in rows)]
    chances = ", ".join(f"{task} {100 * CHANCES[task]:.3g}%" for task in asked)
    words = [Text(f"By chance alone answers are right in: {chances}.")] if asked else []
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
