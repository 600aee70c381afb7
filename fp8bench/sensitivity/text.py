"""A study as text: which layers suffer, and the map to take."""

from __future__ import annotations

from collections.abc import Iterator

from fp8bench import units
from fp8bench.report.blocks import show_params
from fp8bench.report.layout import INDENT, Column, Paint, Row, Tone, painter, table, wrap
from fp8bench.sensitivity.maps import as_words
from fp8bench.sensitivity.study import By, Study, Suffers, Trial, last_of

WIDTH = 100
_LEGEND = (
    "loss gap: of the same steps, weights and data, relative to the reference's loss; above 0 is worse",
    "within the noise: no larger than what another draw of the reference's weights does to its loss",
    "gradient error: of all gradients of the first step, relative to the reference's; it sees what a loss does not",
    "order: failed runs, gaps beyond the noise, then gradient errors; together: the root of the sum of squares",
)
_TONES = {Suffers.FAILED: Tone.BAD, Suffers.WORSE: Tone.BAD, Suffers.BETTER: Tone.GOOD, Suffers.NOISE: Tone.QUIET}


def render(study: Study, color: bool = False, width: int = WIDTH) -> str:
    """All of it, a paragraph each."""
    paint = painter(color)
    paragraphs = [list(_head(study, width, paint))]
    if study.probes:
        paragraphs += [list(_probes(study, width, paint)), list(_groups(study, width))]
    if study.candidates:
        paragraphs += [list(_candidates(study, width, paint)), list(_suggestion(study, width, paint))]
    paragraphs.append(list(_legend(study, width)))
    if study.path:
        paragraphs.append([f"stored in {study.path}"])
    return "\n\n".join("\n".join(lines) for lines in paragraphs if lines)


def _head(study: Study, width: int, paint: Paint) -> Iterator[str]:
    one = "one layer kind" if study.by is By.KIND else "one layer"
    title = f"sensitivity of {study.workload} {show_params(study.params)} on {study.device}"
    yield from (paint(line, Tone.STRONG) for line in wrap(title, width, hang=INDENT))
    yield from wrap(f"{study.low} ({study.level}) in {one} at a time, {study.reference} in the rest", width)
    if study.baseline.loss is None:
        yield from wrap(f"the reference itself failed: {study.baseline.failure or 'it was not run'}", width)
        return
    last = last_of(study.steps)
    words = f"reference: loss {study.baseline.loss:.4f}, the mean of the last {last} of {study.steps} steps"
    others = [_percent(gap) for one in study.draws if (gap := study.gap(one)) is not None]
    if others:
        words += f"; other draws of its weights: {' and '.join(others)}, so that a gap up to {_noise(study)} is noise"
    yield from wrap(words, width)


def _probes(study: Study, width: int, paint: Paint) -> Iterator[str]:
    columns = [
        Column("low" if study.by is By.KIND else "low layer"), Column("kind"), Column("loss gap", right=True),
        Column("gradient error", right=True), Column(""),
    ]  # fmt: skip
    if study.by is By.KIND:
        del columns[1]
    yield from table(columns, [_row(study, one) for one in study.ranking], width, paint)


def _row(study: Study, one: Trial) -> Row:
    suffers = study.suffers(one)
    cells = [one.name, one.kind, _gap(study, one), units.percent(one.gradient_error), suffers.value]
    if study.by is By.KIND:
        del cells[1]
    return Row(tuple(cells), {"": _TONES[suffers]}, (one.failure,) if one.failure else ())


def _groups(study: Study, width: int) -> Iterator[str]:
    """Attention against feed-forward, first against last."""
    if study.by is By.KIND:
        return
    kinds: dict[str, list[str]] = {}
    places: dict[str, list[str]] = {}
    for one in study.probes:
        words = one.name.split(".")
        kinds.setdefault(one.kind, []).append(one.name)
        places.setdefault(".".join(words[:2]) if len(words) > 2 else one.name, []).append(one.name)
    for title, groups in (("by kind", kinds), ("by place", places)):
        found = study.together(groups)
        if len(found) > 1:
            shown = ", ".join(f"{name} {units.percent(error)}" for name, error in found.items())
            yield from wrap(f"gradient errors together, {title}: {shown}", width, hang=INDENT)


def _candidates(study: Study, width: int, paint: Paint) -> Iterator[str]:
    columns = [
        Column("candidate"), Column("layers low", right=True), Column("loss gap", right=True), Column(""),
    ]  # fmt: skip
    rows = []
    for one in study.candidates:
        words = "keeps the loss" if study.keeps(one) else "failed" if one.failure else "loses too much"
        tone = Tone.GOOD if study.keeps(one) else Tone.BAD
        cells = (one.name, str(len(one.low)), _gap(study, one), words)
        rows.append(Row(cells, {"": tone}, (one.failure,) if one.failure else ()))
    yield from table(columns, rows, width, paint)


def _suggestion(study: Study, width: int, paint: Paint) -> Iterator[str]:
    tolerance = units.percentage(100 * study.tolerance)
    found = study.suggested
    if found is None:
        why = "every map was tried" if study.finished else "it was interrupted before all maps were tried"
        yield from wrap(f"no map with {study.low} in some layer keeps the loss within {tolerance}: {why}", width)
        return
    gap = study.gap(found)
    assert gap is not None
    yield from wrap(
        f"suggested: {_which(study, found)}. That map was trained: its loss gap is {_percent(gap)}, within the "
        f"tolerance of {tolerance}",
        width,
    )
    if study.noise is not None and study.tolerance < study.noise:
        yield from wrap(
            f"mind: the tolerance is below the noise of {_noise(study)}, so that a gap may be within it by chance",
            width,
        )
    yield paint(f"{INDENT}{command_of(study, found)}", Tone.STRONG)


def _which(study: Study, found: Trial) -> str:
    every = len(study.candidates[0].low)
    return f"{study.low} in {found.name}" + (f" ({len(found.low)} of {every})" if len(found.low) < every else "")


def command_of(study: Study, found: Trial) -> str:
    """What measures that map beside the reference: on one line, for who copies it."""
    words = [f"fp8bench suite {study.workload} --set size={dict(study.params)['size']}"]
    words.append(f"--dtypes {study.low} --reference {study.reference}")
    if found.precision_map:
        words.append(f"--precision-map {as_words(found.precision_map)}")
    return " ".join(words)


def _legend(study: Study, width: int) -> Iterator[str]:
    yield "how to read this"
    for line in _LEGEND:
        yield from wrap(line, width, INDENT, INDENT)


def _gap(study: Study, one: Trial) -> str:
    gap = study.gap(one)
    return units.NONE if gap is None else _percent(gap)


def _percent(share: float) -> str:
    """With its sign: '+0.12%'."""
    text = units.percent(share, 2)
    return text if text.startswith("-") else f"+{text}"


def _noise(study: Study) -> str:
    return units.percent(study.noise, 2)
