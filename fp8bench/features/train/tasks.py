"""Tasks that a trained model is scored on, made here, without a download; and what is said of arms on them.

Every answer is a choice among a few: a model that has learnt nothing is right as often as chance is.
"""

from __future__ import annotations

import math
import random
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fp8bench.errors import UnknownName, UsageError
from fp8bench.features.train.request import TASKS, TrainingRequest
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
from fp8bench.jobs.profile import function_named
from fp8bench.model import Interval
from fp8bench.report.columns import Col, table
from fp8bench.report.elements import Part, Text, Tone
from fp8bench.report.words.naming import many

# What a text of tasks is asked for by: `--data task:copy,retrieval`.
TASK_TEXT = "task:"
# Figures of a training that are such scores, and those of a metric of somebody's own.
TASK, METRIC = "task:", "metric:"
LETTERS, DIGITS = b"abcdefghijklmnopqrstuvwxyz", b"0123456789"
# Questions of a task, or of one length of it; windows with fewer places ask nothing.
ITEMS, LEAST_SEQUENCE = 128, 16
_CANDIDATES = 4
# A hidden word stands behind so many bytes at most.
_PASSAGE = 64
_CHANCES: Mapping[str, float] = {
    "cloze": 1 / _CANDIDATES, "copy": 1 / len(LETTERS), "retrieval": 1 / len(DIGITS),
}  # fmt: skip
_WORDS = re.compile(rb"[A-Za-z]{4,12}")
# A text of tasks to train on, in bytes, and its least number of documents.
_TEXT_BYTES, _LEAST_DOCUMENTS = 1 << 20, 256


@dataclass(frozen=True)
class TaskItem:
    """A question: `texts` of which the likeliest one is the answer; or one text whose bytes at `places` are answers,
    each among `choices`. `right` is the place of the true text, or of each true byte among the choices."""

    texts: tuple[bytes, ...]
    right: tuple[int, ...]
    places: tuple[int, ...] = ()
    choices: bytes = b""


def _copied(drawn: random.Random, length: int) -> bytes:
    """'qwrtz=qwrtz': letters at random, and once more."""
    letters = bytes(drawn.choices(LETTERS, k=(length - 1) // 2))
    return letters + b"=" + letters


def _retrieved(drawn: random.Random, length: int) -> bytes:
    """'qwr7tzuiop?7': a digit somewhere among letters, which the question mark asks for."""
    letters = bytearray(drawn.choices(LETTERS, k=length - 2))
    digit = drawn.choice(DIGITS)
    letters[drawn.randrange(len(letters))] = digit
    return bytes((*letters, ord("?"), digit))


def lengths_of(sequence: int) -> tuple[int, ...]:
    """Of the contexts that something is retrieved from: an eighth of a window to all of it."""
    return tuple(dict.fromkeys(max(8, sequence // part) for part in (8, 4, 2, 1)))


def _told_again(drawn: random.Random, length: int) -> bytes:
    """A text of one digit, which is asked for at several places behind it."""
    letters, digit = bytearray(drawn.choices(LETTERS, k=length)), drawn.choice(DIGITS)
    place = drawn.randrange(length // 2)
    letters[place] = digit
    while (place := place + 1 + drawn.randrange(1, 8)) + 1 < length:
        letters[place : place + 2] = ord("?"), digit
    return bytes(letters)


def documents_of(tasks: Sequence[str], sequence: int, seed: str, count: int) -> bytes:
    """A text to learn tasks from: documents as long as a window, in turns. Of those that something is retrieved from
    every other one asks once, and at any distance, as questions do."""
    drawn, made = random.Random(f"{seed}/{sequence}"), []
    for number in range(count):
        turn, task = divmod(number, len(tasks))
        if tasks[task] == "copy":
            document = _copied(drawn, sequence)
        elif turn % 2:
            document = _retrieved(drawn, drawn.choice(lengths_of(sequence)))
        else:
            document = _told_again(drawn, sequence)
        made.append(document.ljust(sequence, b"\n"))
    return b"".join(made)


def text_of(word: str, sequence: int) -> tuple[str, bytes, bytes]:
    """The name of a text of tasks, what is trained on, and what is held out. Raises UsageError."""
    tasks = tuple(word.removeprefix(TASK_TEXT).split(","))
    for task in tasks:
        if task not in ("copy", "retrieval"):
            raise UnknownName("task of --data", task, ("copy", "retrieval"), "copy and retrieval have texts")
    _check_sequence(f"--data {word}", sequence)
    count = max(_LEAST_DOCUMENTS, _TEXT_BYTES // sequence)
    parts = [documents_of(tasks, sequence, part, size) for part, size in (("train", count), ("held-out", count // 9))]
    return "+".join(tasks), parts[0], parts[1]


def _check_sequence(option: str, sequence: int) -> None:
    if sequence < LEAST_SEQUENCE:
        raise UsageError(
            f"{option} asks questions of {LEAST_SEQUENCE} tokens or more, and a sequence has {sequence}. Give a "
            f"--sequence of at least {LEAST_SEQUENCE}."
        )


def check_metrics(request: TrainingRequest) -> None:
    """Raise UsageError for what names no function; what it comes to is seen by a worker, before the first step."""
    for metric in request.settings.metric:
        function_named(metric.removesuffix("=lower"))


def check_tasks(request: TrainingRequest, sequence: int) -> None:
    """Raise UsageError for tasks that cannot be made."""
    settings = request.settings
    for task in settings.tasks:
        if task not in TASKS:
            raise UnknownName("task", task, TASKS)
    if settings.tasks:
        _check_sequence("--tasks", sequence)


def items_of(task: str, sequence: int, held_out: bytes) -> Iterator[tuple[str, list[TaskItem]]]:
    """The questions of a task by the names of their figures, the same ones for every arm and seed."""
    drawn = random.Random(f"items/{task}/{sequence}")
    if task == "retrieval":
        for length in lengths_of(sequence):
            texts = [_retrieved(drawn, length) for _ in range(ITEMS)]
            yield f"retrieval@{length}", [_asked(text, (length - 1,), DIGITS) for text in texts]
    elif task == "copy":
        half = (sequence - 1) // 2
        texts = [_copied(drawn, sequence) for _ in range(ITEMS)]
        yield "copy", [_asked(text, tuple(range(half + 1, 2 * half + 1)), LETTERS) for text in texts]
    else:
        yield "cloze", list(_clozes(drawn, sequence, held_out))


def _asked(text: bytes, places: tuple[int, ...], choices: bytes) -> TaskItem:
    return TaskItem((text,), tuple(choices.index(text[place]) for place in places), places, choices)


def _clozes(drawn: random.Random, sequence: int, text: bytes) -> Iterator[TaskItem]:
    """The last word of a passage among others of the text that are as long. Raises UsageError for a text without."""
    length = min(sequence, _PASSAGE)
    places = [match for match in _WORDS.finditer(text) if match.end() > length]
    alike = defaultdict(list)
    for match in places:
        alike[len(match[0])].append(match[0])
    known = {length for length, words in alike.items() if len(set(words)) >= _CANDIDATES}
    asked = [match for match in places if len(match[0]) in known]
    if len(asked) < ITEMS:
        raise UsageError(
            f"--tasks cloze hides words of the held-out text, and it has {len(asked)} of the {ITEMS} that it takes. "
            "Give a longer text, or leave cloze out."
        )
    for match in drawn.sample(asked, ITEMS):
        words, true = {match[0]}, match[0]
        while len(words) < _CANDIDATES:
            words.add(drawn.choice(alike[len(true)]))
        candidates = drawn.sample(sorted(words), _CANDIDATES)
        before = text[match.end() - length : match.start()]
        yield TaskItem(tuple(before + word for word in candidates), (candidates.index(true),))


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
    base, request, made = found.reference, kept.training.request, []
    for name, values in scores.items():
        for arm in (arm.name for arm in kept.training.arms if not arm.skip and not arm.is_band):
            if arm != base:
                made.append(_verdict(request, ScoreVerdict(arm, name, base), values[arm], values[base]))
            elif name.startswith("quantised:") and name != _IN_BF16:
                told = ScoreVerdict(arm, name, "itself in bf16")
                made.append(_verdict(request, told, values[arm], scores[_IN_BF16][arm]))
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
        chance = _CHANCES[name.removeprefix(TASK).partition("@")[0]]
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
        Col("arm", lambda one: one.arm), Col("figure", lambda one: one.figure), Col("against", lambda one: one.against),
        Col("its own", lambda one: one.reference, number=True, show=_four),
        Col("arm's", lambda one: one.own, number=True, show=_four),
        Col("worse by", _worse, number=True, hint="points of a task, else a share; with the 99% interval over seeds"),
        Col("verdict", lambda one: one.word, tone=lambda one: _TONES.get(one.learned, Tone.DOUBT)),
    ]  # fmt: skip
    if rows:
        percent = f"{100 * kept.training.request.margin:g}"
        words = f"{percent} points of a task's answers, or {percent}% of a loss or metric, do not matter."
        asked = [task for task in _CHANCES if any(one.figure.startswith(TASK + task) for one in rows)]
        chances = ", ".join(f"{task} {100 * _CHANCES[task]:.3g}%" for task in asked)
        more = f" By chance alone answers are right in: {chances}." if asked else ""
        yield Part(
            "scores", "Tasks, and losses after quantising", (table("scores", "", cols, rows), Text(words + more))
        )


def _four(value: float) -> str:
    return f"{value:.4g}"


def _worse(one: ScoreVerdict) -> str | None:
    if one.worse is None:
        return None
    unit, ends = " points" if one.figure.startswith(TASK) else "%", one.worse.decides
    span = f" [{100 * ends.low:+.2g}, {100 * ends.high:+.2g}]" if ends else ""
    return f"{100 * one.worse.point:+.2g}{span}{unit}"
