"""Verdicts on loops of one's own, side by side, from nothing but the streams that `fp8bench.watch` has kept of them.

Each stream is one training of one seed. Whether two of them had the same weights and batches no stream can tell: it is
what a gap of pairs takes for granted.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fp8bench.errors import RunNotFound, UsageError
from fp8bench.features.train.kind import line_of
from fp8bench.features.train.values import Arm, ArmRole, StepRow, StreamLine, TrainingEvent, Validation
from fp8bench.features.train.verdicts.curves import Curve, Key, curves_of
from fp8bench.features.train.verdicts.summary import ArmSummary, mean_of
from fp8bench.features.train.verdicts.verdicts import TrainingVerdicts, verdicts_on
from fp8bench.features.train.view import answers, arm_cols
from fp8bench.features.train.words import notes
from fp8bench.report.columns import table
from fp8bench.report.elements import Page, Part
from fp8bench.report.terminal.layout import list_of
from fp8bench.report.words.naming import many

# A stream by its file, or a file for each seed.
Stream = str | Path | Sequence[str | Path]
_SHOWN = ("arm", "loss", "held-out", "gap", "events", "verdict")
_LEGEND = (
    "gap: of the loss, relative to the reference's stream of the same place, which has to have the same batches",
    "in brackets: the 95% interval over seeds; the verdict is by the 99% interval",
)


@dataclass(frozen=True)
class ComparedLoops:
    """The verdicts, and what each loop came to, over so many steps of the reference."""

    verdicts: TrainingVerdicts
    loops: tuple[ArmSummary, ...]
    steps: int


def compared(reference: Stream, others: Sequence[Stream], margin: float) -> ComparedLoops:
    """`margin` is a share. Raises UsageError for streams that cannot be compared."""
    if not others:
        raise UsageError("compare_streams was given one stream. Give a reference's, and at least one more.")
    if not 0 < margin < 1:
        raise UsageError(f"margin is a percentage above 0 and below 100, not {100 * margin:g}.")
    files = [_files(stream) for stream in (reference, *others)]
    counts = {len(paths) for paths in files}
    if len(counts) > 1:
        raise UsageError(
            f"streams of {' and '.join(map(str, sorted(counts)))} seeds do not pair. Give as many files for each."
        )
    read = [[_read(path) for path in paths] for paths in files]
    names = _names(files, [seeds[0] for seeds in read])
    arms = [Arm(name, "fp32", ArmRole.CANDIDATE if place else ArmRole.REFERENCE) for place, name in enumerate(names)]
    lines = [
        replace(_untimed(line), arm=arm.name, seed=seed)
        for arm, seeds in zip(arms, read, strict=True) for seed, own in enumerate(seeds) for line in own
    ]  # fmt: skip
    steps = 1 + max(line.step for line in lines if line.arm == names[0] and isinstance(line, StepRow))
    curves = curves_of(lines, steps)
    looks = any(isinstance(line, Validation) for line in lines)
    found = verdicts_on(arms, curves, tuple(range(len(files[0]))), steps, margin, looks)
    return ComparedLoops(found, tuple(_summary(arm, curves, lines, found) for arm in arms), steps)


def _files(stream: Stream) -> list[Path]:
    files = [Path(stream)] if isinstance(stream, str | Path) else [Path(path) for path in stream]
    if not files:
        raise UsageError("a list of streams is empty. Give a file for each seed.")
    return files


def _read(path: Path) -> list[StreamLine]:
    """The lines of a stream; one that was cut off at its end is left out. Raises UsageError where it has no row."""
    try:
        texts = path.read_text().splitlines()
    except OSError as error:
        raise RunNotFound(f"the stream {path} cannot be read ({error.strerror}).") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is no stream of fp8bench.watch: it is no text.") from None
    lines = []
    for number, text in enumerate(texts, 1):
        try:
            lines.append(line_of(json.loads(text)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if number == len(texts) and number > 1:
                break
            raise UsageError(
                f"line {number} of {path} is none of a stream of fp8bench.watch ({error!s:.80})."
            ) from None
    if not any(isinstance(line, StepRow) for line in lines):
        raise UsageError(f"{path} has no row of a step: nobody has seen its loss. See what events it has.")
    return lines


def _untimed(line: StreamLine) -> StreamLine:
    return replace(line, seconds=0.0, tokens=line.tokens or 1) if isinstance(line, StepRow) else line


def _names(files: Sequence[Sequence[Path]], first: Sequence[Sequence[StreamLine]]) -> list[str]:
    """What loops were called; by their files where these are alike, numbered where even those are."""
    called = [next(line.arm for line in lines) for lines in first]
    for names in (called, [paths[0].stem for paths in files]):
        if len(set(names)) == len(names):
            return names
    return [f"{paths[0].stem} {place}" for place, paths in enumerate(files, 1)]


def _summary(arm: Arm, curves: Mapping[Key, Curve], lines: Sequence[StreamLine], found: TrainingVerdicts) -> ArmSummary:
    own = [curve for (name, _), curve in curves.items() if name == arm.name]
    events = Counter(line.arm for line in lines if isinstance(line, TrainingEvent))
    last = [curve.held_out[max(curve.held_out)] for curve in own if curve.held_out]
    return ArmSummary(
        arm, sum(len(curve.rows) for curve in own), mean_of([curve.endpoint for curve in own if curve.whole]),
        mean_of(last), None, None, None, None, {}, None, None, events[arm.name], found.of(arm.name),
    )  # fmt: skip


def loops_page(compared_loops: ComparedLoops) -> Page:
    found, rows, steps = compared_loops.verdicts, compared_loops.loops, compared_loops.steps
    parts = [Part("answer", "", tuple(answers(found)))]
    parts += [Part("arms", "", (table("arms", "", arm_cols(found, rows, _SHOWN), rows, main=True),))]
    parts += list_of("notes", "notes", _notes(found))
    title = f"{many(len(rows), 'loop')} of {many(steps, 'step')} in {many(len(found.seeds), 'seed')}"
    return Page(title, "", tuple(parts), _LEGEND)


def _notes(found: TrainingVerdicts) -> Iterator[str]:
    yield "that streams of one place had the same initial weights and batches is taken for granted"
    if not found.looks:
        yield "no loop told a held-out loss, and that of training alone decides: loop.held_out(value) tells one"
    for said in found.arms:
        yield from (f"{said.arm.name}: {note}" for note in notes(said))
