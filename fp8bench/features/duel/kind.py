"""Stores duels, and reads and shows stored duels.

The file is `<store>/duels/<utc>-<id>.jsonl`, in JSON lines. Each session is written before the next one begins. Duels
are stored apart from runs, because a run has one interpreter and one commit, and a duel has two. A duel also measures
two processes at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

from fp8bench.features.duel.values import CaseResult, CaseSession, Duel
from fp8bench.files import LineWriter
from fp8bench.jobs.kinds import ResultKind, ResultView
from fp8bench.model.codec import SCHEMA, MalformedValueError, decode, encode
from fp8bench.model.file_names import format_start_time
from fp8bench.store.kept_lines import LineContent, UnknownKind, process_line_contents, read_file_lines, read_header
from fp8bench.store.runs.run_file import explain_invalid_record

# Fields that later lines of the file add, or that are only known when it is read.
_FIELDS_NOT_IN_HEADER = {"results", "path", "finished", "troubles", "notes"}


@dataclass
class DuelWriter(LineWriter):
    """Writes the results and sessions of a duel into its open file."""

    called: str = "the duel's file"

    def write_result(self, result: CaseResult) -> None:
        self._append_numbered_lines([{"result": encode(result)}])

    def write_session(self, case: str, session: CaseSession) -> None:
        self._append_numbered_lines([{"case": case, "session": encode(session)}])


def start_duel(duel: Duel, store: Path) -> DuelWriter:
    path = store / "duels" / f"{format_start_time(duel.started)}-{duel.id}.jsonl"
    header = {
        field.name: encode(getattr(duel, field.name))
        for field in fields(duel)
        if field.name not in _FIELDS_NOT_IN_HEADER
    }
    return DuelWriter.start(path, {"schema": SCHEMA, "duel": header})


def _require_valid_result(result: CaseResult) -> CaseResult:
    # Both sides must describe the same case, otherwise their times cannot be compared.
    is_same_case = result.before.case.id == result.after.case.id
    result_problems = [
        "" if is_same_case else "its sides have different cases",
        explain_invalid_record(result.before),
        explain_invalid_record(result.after),
    ]
    for session in result.sessions:
        for record, timings in ((result.before, session.before), (result.after, session.after)):
            result_problems += [] if timings else ["a session lacks the times of one side"]
            result_problems += [explain_invalid_record(replace(record, timing=timing)) for timing in timings]
    for problem in filter(None, result_problems):
        raise MalformedValueError(problem)
    return result


class DuelKind(ResultKind[Duel]):
    """Reads and shows stored duels. Duels cannot be exported as CSV, and have no history."""

    name = "duel"
    holds = Duel
    pattern = "duels/*.jsonl"
    refused = ("csv", "log")

    def load(self, path: Path) -> Duel:
        duel_file_lines = read_file_lines(path, "the duel's file")
        duel: Duel = read_header(duel_file_lines, path, "duel", lambda plain: decode(Duel, plain))
        results = {}
        notes = []
        end_line_contents = []

        # Lines are read one by one, so a truncated file lacks only its last line.
        def parse_line(content: LineContent) -> None:
            if "result" in content:
                result = _require_valid_result(decode(CaseResult, content["result"]))
                results[result.after.case.id] = result
            # A session is appended when it has been measured.
            elif "session" in content:
                result = results[content["case"]]
                sessions = (*result.sessions, decode(CaseSession, content["session"]))
                results[content["case"]] = _require_valid_result(replace(result, sessions=sessions))
            elif "note" in content:
                notes.append(decode(str, content["note"]))
            elif "end" in content:
                end_line_contents.append(content["end"])
            else:
                raise UnknownKind

        troubles = process_line_contents(duel_file_lines, parse_line, except_line=1)
        return replace(
            duel,
            results=tuple(results.values()),
            notes=tuple(notes),
            troubles=tuple(troubles),
            # Only the last line can mark a file as complete.
            finished=end_line_contents[-1:] == ["finished"],
            path=str(path),
        )

    def view(self, kept: Duel) -> ResultView:
        from fp8bench.features.duel.view import encode_duel, render_page

        return ResultView(partial(render_page, kept), partial(encode_duel, kept))

    def report(self, duel: Duel) -> ResultView:
        return self.view(duel)


KINDS = (DuelKind(),)
