"""A duel's file: `<store>/duels/<utc>-<id>.jsonl`, JSON lines, every sitting through to the disk before the next.

It lies beside the runs and not among them: what it holds was measured with another interpreter or of another commit
than the history's runs, two processes at a time, and belongs to no series.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import IO, Any

from fp8bench.codec import SCHEMA, Malformed, decode, encode
from fp8bench.dueling.duel import Bout, Duel, Sitting
from fp8bench.errors import RunNotFound, StoreError
from fp8bench.history.soundness import unsound

_NOT_IN_HEADER = {"bouts", "path", "finished", "troubles", "notes"}


@dataclass
class DuelWriter:
    """An open file of a duel."""

    path: Path
    _file: IO[str]

    def bout(self, bout: Bout) -> None:
        """A case with all that there is of it."""
        self._line({"bout": encode(bout)})

    def sitting(self, case: str, sitting: Sitting) -> None:
        """One more sitting of a case that is there."""
        self._line({"case": case, "sitting": encode(sitting)})

    def note(self, text: str) -> None:
        """Something a reader of the duel should know."""
        self._line({"note": text})

    def finish(self, how: str) -> None:
        """The end line: 'finished' or 'interrupted'."""
        self._line({"end": how})

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()

    def _line(self, value: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(value, separators=(",", ":"), allow_nan=False) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise StoreError(
                f"the duel's file {self.path} cannot be written ({error.strerror}). What was finished before is in it; "
                "make room, or choose another --store DIR."
            ) from None


def start_duel(duel: Duel, store: Path) -> DuelWriter:
    """Create the file with its header."""
    stamp = re.sub(r"[-:]", "", duel.started).partition("+")[0] + "Z"
    path = store / "duels" / f"{stamp}-{duel.id}.jsonl"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        writer = DuelWriter(path, path.open("x", encoding="utf-8"))
    except OSError as error:
        raise StoreError(
            f"the duel's file {path} cannot be made ({error.strerror}). Choose another --store DIR."
        ) from None
    header = {one.name: encode(getattr(duel, one.name)) for one in fields(duel) if one.name not in _NOT_IN_HEADER}
    try:
        writer._line({"schema": SCHEMA, "duel": header})
    except BaseException:
        writer.close()
        raise
    return writer


def find_duel(word: str, store: Path) -> Path | None:
    """The duel that a word means: a path, a file's stem, an id, or the beginning of one; None if it means none."""
    with contextlib.suppress(OSError, ValueError):
        path = Path(word)
        if path.is_file() and path.resolve().parent.name == "duels":
            return path
    files = sorted((store / "duels").glob("*.jsonl"))
    exact = [path for path in files if word in (path.stem, path.stem.rpartition("-")[2])]
    found = exact or [path for path in files if word and path.stem.rpartition("-")[2].startswith(word)]
    return found[0] if len(found) == 1 else None


def load_duel(path: Path) -> Duel:
    """Read a duel. Broken lines are left out and named in `troubles`; raises StoreError where it is none."""
    try:
        lines = path.read_bytes().decode("utf-8-sig", errors="replace").splitlines()
    except OSError as error:
        raise RunNotFound(f"the duel's file {path} cannot be read ({error.strerror}).") from None
    duel = _header(lines[0] if lines else "", path)
    bouts: dict[str, Bout] = {}
    notes, troubles, finished = [], [], False
    for number, line in enumerate(lines[1:], 2):
        try:
            content = json.loads(line)
            if "bout" in content:
                bout = _bout(content["bout"])
                bouts[bout.after.case.id] = bout
            elif "sitting" in content:
                bout = bouts[content["case"]]
                more = (*bout.sittings, decode(Sitting, content["sitting"]))
                bouts[content["case"]] = _sound(replace(bout, sittings=more))
            elif "note" in content:
                notes.append(decode(str, content["note"]))
            elif "end" in content:
                finished = content["end"] == "finished"
            else:
                troubles.append(f"line {number} is of a kind that this version does not know, and was left out")
        except (ValueError, KeyError, RecursionError, TypeError) as error:
            troubles.append(f"line {number} is broken and was left out ({str(error)[:120]})")
    return replace(
        duel,
        bouts=tuple(bouts.values()),
        notes=tuple(notes),
        troubles=tuple(troubles),
        finished=finished,
        path=str(path),
    )


def _header(line: str, path: Path) -> Duel:
    try:
        content = json.loads(line)
        schema = content["schema"]
        if type(schema) is int and schema > SCHEMA:
            raise StoreError(
                f"{path} was written by a newer fp8bench (schema {schema}, this one reads {SCHEMA}). Upgrade it."
            )
        return decode(Duel, content["duel"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise StoreError(f"{path} is no duel: its first line is no header ({str(error)[:120]}).") from None


def _bout(plain: Any) -> Bout:
    return _sound(decode(Bout, plain))


def _sound(bout: Bout) -> Bout:
    """The bout, if its samples make sense."""
    for why in _wrong(bout):
        raise Malformed(why)
    return bout


def _wrong(bout: Bout) -> Iterator[str]:
    if bout.before.case.id != bout.after.case.id:
        yield "its sides are of different cases"
    yield from filter(None, (unsound(bout.before), unsound(bout.after)))
    for sitting in bout.sittings:
        for record, timings in ((bout.before, sitting.before), (bout.after, sitting.after)):
            if not timings:
                yield "a sitting has no times of a side"
            yield from filter(None, (unsound(replace(record, timing=timing)) for timing in timings))
