"""Advice on a stored run, and measuring what it predicts.

What was measured is kept in `<store>/advice.jsonl`, a line each, append-only, in any order: {"version": 1, "checked":
{...}}.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fp8bench.analysis.findings import findings
from fp8bench.errors import StoreError, UsageError
from fp8bench.features.advise.basis import Basis, Trained, speed_of
from fp8bench.features.advise.values import Advice, AdviceKind, Advised, Checked
from fp8bench.features.infer.values import kept_answers
from fp8bench.features.sensitivity.job import studies_of, write_map_file
from fp8bench.features.sensitivity.study import as_words
from fp8bench.features.train.kind import load_training, training_named
from fp8bench.features.train.verdicts.verdicts import verdicts_of
from fp8bench.model import Interval, Run
from fp8bench.pipeline import execute, measure_again, now
from fp8bench.protocols import Observer
from fp8bench.store.kept_lines import Log
from fp8bench.store.runs.listing import load_named, store_of

# Facts of the environment that stand beside a check.
_UNDER = ("machine", "torch", "commit", "threads")


def basis_of(
    word: str, store: Path, training: str | None, least: float, beside: Sequence[str] = ()
) -> tuple[Basis, list[str]]:
    """The run that a word means with what else the store knows of it, and what of that could not be read."""
    run = load_named(word, store)
    other_runs = [load_named(name, store) for name in beside]
    for other in other_runs:
        _refuse_foreign(run, other)
    studies, troubles = studies_of(store_of(Path(run.path)) or store)
    trained = None
    if training is not None:
        kept = load_training(training_named(training, store))
        trained = Trained(kept, verdicts_of(kept.training, kept.lines))
        troubles += kept.troubles
    known = tuple((other, findings(other)) for other in other_runs)
    answers, wrong = kept_answers(store_of(Path(run.path)) or store).lines()
    ids = {run.id, *(other.id for other in other_runs)}
    served = tuple(dict.fromkeys(answer for answer in answers if ids & {*answer.runs}))
    return Basis(run, findings(run), studies, trained, least, known, served), troubles + wrong


def _refuse_foreign(run: Run, other: Run) -> None:
    """Raise where what another run timed says nothing of this one: another machine, torch or device."""
    names = {device.key: device.name for device in run.devices}
    for what, own, theirs in (
        *((name, run.environment.get(name), other.environment.get(name)) for name in ("machine", "torch")),
        *((f"device {device.key}", names.get(device.key, device.name), device.name) for device in other.devices),
    ):
        if own != theirs:
            raise UsageError(
                f"the run {other.id} says nothing of {run.id}: its {what} is {theirs}, and not {own}. Measure it here, "
                "or leave it out."
            )


def write_map(found: Advised, run: Run, path: Path) -> None:
    routes = [advice for advice in found.advice if advice.kind is AdviceKind.ROUTE and advice.precision_map]
    if not routes:
        raise UsageError(
            f"no layer of the run {run.id} is advised to stay high, so that there is no map to write. "
            "`fp8bench sensitivity` finds out which layers suffer."
        )
    first = routes[0]
    write_map_file(path, f"{first.mode} on run {run.id}: {first.sentence}", first.precision_map)


def checkable(advice: Sequence[Advice]) -> list[Advice]:
    """What predicts the speed of a step, what gives most first; a schedule would take a training."""
    return [one for one in advice if one.gain is not None and one.kind is not AdviceKind.SCHEDULE]


def checked(basis: Basis, found: Advised, most: int, store: Path, observer: Observer) -> tuple[Checked, ...]:
    wanted = checkable(found.advice)[:most]
    if not wanted:
        raise UsageError(
            f"nothing that is advised on the run {basis.run.id} predicts the speed of a step, so that there is nothing "
            "to check. Emulated precisions have none."
        )
    done = []
    for advice in wanted:
        again = _measured(basis.run, advice, store, observer)
        speed, why = _speed(advice, again)
        under = tuple((name, value) for name in _UNDER if (value := again.environment.get(name)) is not None)
        one = Checked(advice, basis.run.id, again.id, now(), speed, why, under)
        keep_checks(store, [one])
        done.append(one)
        if not again.finished:
            raise KeyboardInterrupt
    return tuple(done)


def _measured(run: Run, advice: Advice, store: Path, observer: Observer) -> Run:
    """The same group once more in fresh processes; with a map of layers, or in another mode, as a run of its own."""
    command = f"fp8bench advise {run.id} --check"
    timed = any(record.case.id == advice.case for record in run.records)
    if timed and not advice.precision_map:
        return measure_again(run, {advice.case}, store, observer, command)
    case = next(record.case for record in run.records if record.case.setting == advice.settings[0])
    own = {name: str(value) for name, value in case.params}
    axes = tuple((name, (own[name],) if name in own else values) for name, values in run.request.axes)
    request = replace(
        run.request, suite=case.workload, dtypes=(advice.reference, advice.mode), reference=advice.reference,
        devices=(case.device,), axes=axes, precision_map=advice.precision_map, grid=False, trace=None,
    )  # fmt: skip
    return execute(request, store, observer, f"{command} ({as_words(advice.precision_map)})", origin="advice")


def _speed(advice: Advice, again: Run) -> tuple[Interval | None, str]:
    setting = advice.settings[0]
    record = next(
        (one for one in again.records if one.case.setting == setting and not one.is_reference
         and (one.case.precision_map == advice.precision_map if advice.precision_map else one.case.id == advice.case)),
        None,
    )  # fmt: skip
    if record is None:
        return None, "its run has no such case"
    finding = findings(again).get(record.case.id)
    if finding is None or finding.ratio is None:
        return None, record.reason or (finding.why if finding is not None else "") or "it has no speed there"
    if finding.hard:
        return None, finding.why
    return speed_of(finding), ""


_VERSION = 1


def checks_of(store: Path) -> Path:
    return store / "advice.jsonl"


def load_checks(store: Path) -> tuple[tuple[Checked, ...], list[str]]:
    """Oldest first, each once, and what is wrong with lines that were left out: none without the file."""
    try:
        found, troubles = _log(store).lines()
    except OSError as error:
        raise StoreError(f"{checks_of(store)} cannot be read ({error.strerror}).") from None
    each_once = sorted(dict.fromkeys(found), key=lambda one: one.when)
    return tuple(each_once), [f"{trouble}, and was left out" for trouble in troubles]


def keep_checks(store: Path, checked: Sequence[Checked]) -> None:
    _log(store).append(checked)


def _log(store: Path) -> Log[Checked]:
    return Log(checks_of(store), {"checked": Checked}, "check", _VERSION, "Choose another --store.")
