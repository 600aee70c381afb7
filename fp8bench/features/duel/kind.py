"""A duel's file in a store, and how it is found and shown.

The file is `<store>/duels/<utc>-<id>.jsonl`, JSON lines; each session is on disk before the next begins. It is not
among the runs: it was measured with a different interpreter, or at a different commit, two processes at a time, and
does not belong to any series.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

from fp8bench.features.duel.values import CaseResult, Duel, Session
from fp8bench.files import LineWriter
from fp8bench.jobs.kinds import Kind, View
from fp8bench.model.codec import SCHEMA, Malformed, decode, encode
from fp8bench.model.file_names import stamp
from fp8bench.store.kept_lines import Content, UnknownKind, lines_of, read_header, take_lines
from fp8bench.store.runs.run_file import why_unsound

_NOT_IN_HEADER = {"results", "path", "finished", "troubles", "notes"}


@dataclass
class DuelWriter(LineWriter):
    """An open file of a duel."""

    called: str = "the duel's file"

    def result(self, result: CaseResult) -> None:
        self._lines([{"result": encode(result)}])

    def session(self, case: str, session: Session) -> None:
        self._lines([{"case": case, "session": encode(session)}])


def start_duel(duel: Duel, store: Path) -> DuelWriter:
    path = store / "duels" / f"{stamp(duel.started)}-{duel.id}.jsonl"
    header = {
        field.name: encode(getattr(duel, field.name)) for field in fields(duel) if field.name not in _NOT_IN_HEADER
    }
    return DuelWriter.start(path, {"schema": SCHEMA, "duel": header})


def _check_result(result: CaseResult) -> CaseResult:
    # Both sides must describe the case equally, otherwise their times do not compare.
    same = result.before.case.id == result.after.case.id
    problems = [
        "" if same else "its sides are of different cases",
        why_unsound(result.before),
        why_unsound(result.after),
    ]
    for session in result.sessions:
        for record, timings in ((result.before, session.before), (result.after, session.after)):
            problems += [] if timings else ["a session has no times of a side"]
            problems += [why_unsound(replace(record, timing=timing)) for timing in timings]
    for problem in filter(None, problems):
        raise Malformed(problem)
    return result


class DuelKind(Kind[Duel]):
    """Duels have no rows, and no history."""

    name = "duel"
    holds = Duel
    pattern = "duels/*.jsonl"
    refused = ("csv", "log")

    def load(self, path: Path) -> Duel:
        sheet = lines_of(path, "the duel's file")
        duel: Duel = read_header(sheet, path, "duel", lambda plain: decode(Duel, plain))
        results: dict[str, CaseResult] = {}
        notes, ends = [], []

        # Lines are processed one by one: a truncated file lacks only its last line.
        def take(content: Content) -> None:
            if "result" in content:
                result = _check_result(decode(CaseResult, content["result"]))
                results[result.after.case.id] = result
            # Each session is appended once it is measured.
            elif "session" in content:
                result = results[content["case"]]
                sessions = (*result.sessions, decode(Session, content["session"]))
                results[content["case"]] = _check_result(replace(result, sessions=sessions))
            elif "note" in content:
                notes.append(decode(str, content["note"]))
            elif "end" in content:
                ends.append(content["end"])
            else:
                raise UnknownKind

        troubles = take_lines(sheet, take, but=1)
        return replace(
            duel,
            results=tuple(results.values()),
            notes=tuple(notes),
            troubles=tuple(troubles),
            # Only the last line marks a complete file.
            finished=ends[-1:] == ["finished"],
            path=str(path),
        )

    def view(self, kept: Duel) -> View:
        from fp8bench.features.duel.view import page_of, value_of

        return View(partial(page_of, kept), partial(value_of, kept))

    report = view


KINDS = (DuelKind(),)
