"""A study as text: which layers suffer, and the map to take."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

from fp8bench import units
from fp8bench.features.sensitivity.study import By, Study, Suffers, Trial, as_words, last_of
from fp8bench.model.codec import SCHEMA, encode
from fp8bench.report.columns import Col, table
from fp8bench.report.data.plain import csv_text, json_line
from fp8bench.report.elements import Code, Element, Field, Page, Part, Table, Text, Tone
from fp8bench.report.panels import show_params, together

_LEGEND = (
    "loss gap: of the same steps, weights and data, relative to the reference's loss; above 0 is worse",
    "within the noise: no larger than what another draw of the reference's weights does to its loss",
    "gradient error: of all gradients of the first step, relative to the reference's; it sees what a loss does not",
    "order: failed runs, gaps beyond the noise, then gradient errors; together: the root of the sum of squares",
)
_TONES = {Suffers.FAILED: Tone.BAD, Suffers.WORSE: Tone.BAD, Suffers.BETTER: Tone.GOOD, Suffers.NOISE: Tone.DOUBT}


def page_of(study: Study) -> Page:
    one = "one layer kind" if study.by is By.KIND else "one layer"
    what = f"{study.low} ({study.level}) in {one} at a time, {study.reference} in the rest"
    elements: list[list[Element]] = [[Text(what), Text(_reference(study))]]
    if study.probes:
        elements += [[_probes(study)], [Text(words) for words in _groups(study)]]
    if study.candidates:
        elements += [[_candidates(study)], list(_suggestion(study))]
    elements += [[Text(f"stored in {study.path}")]] if study.path else []
    parts = tuple(Part(f"part-{n}", "", tuple(found)) for n, found in enumerate(elements))
    title = f"sensitivity of {study.workload} {show_params(study.params)} on {study.device}"
    return Page(title, "", parts, _LEGEND)


def _reference(study: Study) -> str:
    """Its loss, and what other draws of its weights do to it, which is the noise."""
    if study.baseline.loss is None:
        return f"the reference itself failed: {study.baseline.failure or 'it was not run'}"
    last = last_of(study.steps)
    words = f"reference: loss {study.baseline.loss:.4f}, the mean of the last {last} of {study.steps} steps"
    words += " on its one batch" if "make" in dict(study.params) else ""
    others = [_percent(gap) for one in study.draws if (gap := study.gap(one)) is not None]
    if others:
        words += f"; other draws of its weights: {' and '.join(others)}, so that a gap up to {_noise(study)} is noise"
    return words


def _probes(study: Study) -> Table:
    by_kind = study.by is By.KIND  # then it has no column of its own
    cols: list[Col[Trial]] = [
        Col("low" if by_kind else "low layer", lambda one: one.name),
        Col("kind", lambda one: one.kind, when=not by_kind),
        Col("loss gap", lambda one: _gap(study, one), number=True),
        Col("gradient error", lambda one: units.percent(one.gradient_error), number=True),
        Col("verdict", lambda one: study.suffers(one).value, tone=lambda one: _TONES[study.suffers(one)]),
        Col("why", lambda one: one.failure, below=True),
    ]
    return table("probes", "", cols, study.ranking)


def _groups(study: Study) -> Iterator[str]:
    """Attention against feed-forward, first against last."""
    if study.by is By.KIND:
        return
    words = [(one.name, one.name.split(".")) for one in study.probes]
    kinds = ((one.kind, one.name) for one in study.probes)
    places = ((".".join(parts[:2]) if len(parts) > 2 else name, name) for name, parts in words)
    for title, named in (("by kind", kinds), ("by place", places)):
        found = study.together(together(named))
        if len(found) > 1:
            shown = ", ".join(f"{name} {units.percent(error)}" for name, error in found.items())
            yield f"gradient errors together, {title}: {shown}"


def _candidates(study: Study) -> Table:
    def verdict(one: Trial) -> Field:
        if study.keeps(one):
            return Field("keeps the loss", tone=Tone.GOOD)
        lost = "loses too much" if (study.gap(one) or 0) > study.tolerance else "its gradients are too far off"
        return Field("failed" if one.failure else lost, tone=Tone.BAD)

    cols: list[Col[Trial]] = [
        Col("candidate", lambda one: one.name),
        Col("layers low", lambda one: str(len(one.low)), number=True),
        Col("loss gap", lambda one: _gap(study, one), number=True),
        Col("gradient error", lambda one: units.percent(one.gradient_error), number=True,
            when=study.gradient_tolerance is not None),
        Col("verdict", verdict),
        Col("why", lambda one: one.failure, below=True),
    ]  # fmt: skip
    return table("candidates", "", cols, study.candidates)


def _suggestion(study: Study) -> Iterator[Element]:
    tolerance = units.percentage(100 * study.tolerance)
    found = study.suggested
    if study.gradient_tolerance is not None:
        tolerance += f", and its first gradients within {units.percentage(100 * study.gradient_tolerance)}"
    if found is None:
        why = "every map was tried" if study.finished else "it was interrupted before all maps were tried"
        words = f"no map with {study.low} in some layer keeps the loss within {tolerance}: {why}"
        if study.undecided:
            words = f"no map is suggested: every gap lies within the noise of {_noise(study)}, so that no layer can be "
            words += f"told from another, nor {study.low} from {study.reference}; --steps with more steps may tell"
        yield Text(words)
        return
    gap = study.gap(found)
    assert gap is not None
    every = len(study.candidates[0].low)
    of_all = f" ({len(found.low)} of {every})" if len(found.low) < every else ""
    yield Text(
        f"suggested: {study.low} in {found.name}{of_all}. That map was trained: its loss gap is {_percent(gap)}, "
        f"within the tolerance of {tolerance}"
    )
    if study.noise is not None and study.tolerance < study.noise:
        yield Text(
            f"mind: the tolerance is below the noise of {_noise(study)}, so that a gap may be within it by chance"
        )
    yield Code(command_of(study, found))


def command_of(study: Study, found: Trial) -> str:
    """What measures that map beside the reference: on one line, for who copies it."""
    params = dict(study.params)
    own = f"fp8bench profile {shlex.quote(str(params.get('make')))}"
    words = [own if "make" in params else f"fp8bench suite {study.workload} --set size={params['size']}"]
    words.append(f"--dtypes {study.low} --reference {study.reference}")
    if found.precision_map:
        words.append(f"--precision-map {as_words(found.precision_map)}")
    return " ".join(words)


def _gap(study: Study, one: Trial) -> str:
    gap = study.gap(one)
    return units.NONE if gap is None else _percent(gap)


def _percent(share: float) -> str:
    """With its sign: '+0.12%'."""
    text = units.percent(share, 2)
    return text if text.startswith("-") else f"+{text}"


def _noise(study: Study) -> str:
    return units.percent(study.noise, 2)


def as_json(study: Study) -> str:
    """The document on one line: every loss, and beside each run what it says."""
    document = {"schema": SCHEMA, **encode(study), "noise": encode(study.noise)}
    document["baseline"] = _told(study, study.baseline)
    for part in ("draws", "probes", "candidates"):
        document[part] = [_told(study, one) for one in getattr(study, part)]
    document["ranking"] = [one.name for one in study.ranking]
    found = study.suggested
    document["suggested"] = None if found is None else as_words(found.precision_map)
    return json_line(document)


def _told(study: Study, one: Trial) -> dict[str, Any]:
    said = {"loss": one.loss, "loss_gap": study.gap(one), "says": study.suffers(one).value}
    return {**encode(one), **{name: encode(value) for name, value in said.items()}}


def as_csv(study: Study) -> str:
    """A row a run; numbers with all their digits, nothing for what is not known."""
    rows = list(_rows(study))
    return csv_text(tuple(rows[0]), rows)


def _rows(study: Study) -> Iterator[dict[str, Any]]:
    parts = (("reference", (study.baseline,)), ("draw", study.draws), ("low", study.ranking))
    for part, trials in (*parts, ("candidate", study.candidates)):
        for one in trials:
            yield {
                "part": part, "name": one.name, "kind": one.kind, "precision": one.precision,
                "precision_map": as_words(one.precision_map), "layers_low": len(one.low), "draw": one.draw,
                "loss": one.loss, "loss_gap": study.gap(one), "noise": study.noise,
                "gradient_error": one.gradient_error, "says": study.suffers(one).value,
                "keeps_loss": study.keeps(one) if part == "candidate" else None, "failure": one.failure,
            }  # fmt: skip
