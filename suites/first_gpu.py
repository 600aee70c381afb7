"""The first hour on a GPU: `python -m suites.first_gpu --minutes 9 --out FOLDER`. Repeat it until no step is open.

`--brisk` takes only the first steps, which answer the open questions, for a GPU that is lent for minutes. Their
seconds are computed from their plans, and steps that do not fit are named and left out. FOLDER/first_gpu.tar.gz has
all files after each step; `--archive` continues from it on another machine.

A bare machine needs torchao besides torch and Triton. The steps of tests also need pytest, hypothesis and ml_dtypes.

Steps are in the order of their value, cheap ones first. Each ends within 10 minutes, and leaves files in the folder:
NAME.state.json, its output, and its rows. The next call continues after any interruption: a finished step is not
repeated (except with `--again NAME`), and an interrupted run or training is resumed. At the end, FOLDER/table.md has
the figures, and FOLDER/changes.md has what to change in README.md and docs/status.md.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from fp8bench.errors import EXIT_FAILED, EXIT_OK, EXIT_USAGE, Fp8benchError
from fp8bench.files import write_whole
from suites.first_gpu_brisk import BRISK_STEPS, STEPS, expected_seconds
from suites.first_gpu_cards import card_of, compared, remarks
from suites.first_gpu_steps import NATIVE, FirstStep, Line, NoFigure, StepFiles, base_of
from suites.kill import children, wait_until_gone
from suites.trials import ROOT, conditions, environment, options, say

LONGEST = 600
# A step that has reached its limit this many times is given up.
_MOST_OVERRUNS = 2
_GRACE = 20.0
# A step may take this many times its computed seconds, and at least these seconds.
_SLOWER, _LEAST_LIMIT = 2.0, 60.0
_STORED = ("doctor", "suite", "train", "infer", "ablate")
ARCHIVE = "first_gpu.tar.gz"
_NOT_ARCHIVED = frozenset({ARCHIVE, f"{ARCHIVE}.part", "lock"})


class Row(NamedTuple):
    """A row of the table. `published` compares the figure with a published one; '' if there is none."""

    line: str
    target: str
    measured: str
    verdict: str
    published: str = ""


def only_native(word: str, native: Mapping[str, str]) -> str:
    """Returns the modes of `native:A,B` that the GPU multiplies natively, as A,B. Other words are unchanged."""
    if not word.startswith(NATIVE):
        return word
    names = word.removeprefix(NATIVE).split(",")
    return ",".join(name for name in names if native.get(base_of(name), "native") == "native")


def command_of(files: StepFiles, native: Mapping[str, str]) -> list[str]:
    """Returns the command of a step, or the command that resumes what an interrupted attempt has begun.

    In it, `native:A,B` is replaced by those modes that the GPU multiplies natively.
    """
    step = files.step
    words = [word.format(json=files.path("json")) for word in step.words.split()]
    kind = words[1] if words[0] == "fp8bench" else words[0]
    if begun := files.begun():
        words = [*words[:2], "--resume", begun[-1].stem.split("-")[-1], *(["--json"] if kind == "train" else [])]
    words = [only_native(word, native) for word in words]
    if kind == "suite":
        words += ["--csv", str(files.path("csv")), "--no-report"]
    return [sys.executable, "-m", *words, *(["--store", str(files.store)] if kind in _STORED else [])]


def _descendants(pid: int) -> list[int]:
    return [name for child in children(pid) for name in (child, *_descendants(child))]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Interrupts a process, so that it stores its results. If it does not end, kills it with all its descendants."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(_GRACE)
    except subprocess.TimeoutExpired:
        pids = [process.pid, *_descendants(process.pid)]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        process.wait()
        wait_until_gone(pids, _GRACE)


def _ended_with_parent() -> None:
    """Makes a step end with its parent. Otherwise it would continue to measure, and lock its run, if only the parent
    is killed.
    """
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def take(files: StepFiles, limit: float, native: Mapping[str, str]) -> dict[str, Any]:
    """Makes one attempt at a step, in this process's group, so that killing the group leaves no process running."""
    state = files.state() or {"state": "begun", "attempts": 0, "overruns": 0}
    commit = conditions()["commit"]
    if state.get("commit", commit) != commit:  # results of two commits would not be comparable
        shutil.rmtree(files.store, ignore_errors=True)
    command = command_of(files, native)
    state |= {
        "commit": commit,
        "attempts": state["attempts"] + 1,
        "command": command[1:],
        "begun": datetime.now(UTC).isoformat(),
    }
    files.write(state)
    start = time.monotonic()
    with files.path("out").open("wb") as out, files.path("err").open("wb") as err:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=err,
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.DEVNULL,
            preexec_fn=_ended_with_parent,  # noqa: PLW1509 - there are no threads here
        )
        try:
            state["code"] = process.wait(limit)
        except subprocess.TimeoutExpired:
            _end(process)
            state["code"] = None
    state["seconds"] = round(time.monotonic() - start, 1)
    if (
        state["code"] == EXIT_USAGE and "--resume" in command
    ):  # files have changed: the two parts would not be comparable
        shutil.rmtree(files.store)
        return take(files, max(1.0, limit - state["seconds"]), native)
    # A step that a signal ended, for example because memory ran out, has no answer. A step that had too little time
    # did nothing wrong.
    ended = state["code"] is not None and state["code"] >= 0
    state["overruns"] += not ended and (limit >= LONGEST or state["code"] is not None)
    if ended or state["overruns"] >= _MOST_OVERRUNS:
        state |= {"state": "ended", **conditions()}
    files.write(state)
    return state


def waiting(steps: Sequence[FirstStep], folder: Path) -> list[StepFiles]:
    """Returns the steps that have not ended, in their order."""
    every = (StepFiles(step, folder) for step in steps)
    return [files for files in every if (files.state() or {}).get("state") != "ended"]


def native_of(probe: Mapping[str, Any]) -> dict[str, str]:
    """Returns for each precision whether the probed device multiplies it: 'native', 'emulated' or 'refused'."""
    return {name: level for name, (level, _) in probe.get("precisions", {}).items()}


def seconds_of(files: StepFiles, probe: Mapping[str, Any]) -> float:
    """Returns the seconds of a step, computed from its plan on the probed device, or else its usual seconds."""
    if "--brisk" not in files.step.words:
        return files.step.seconds
    words = [only_native(word, native_of(probe)) for word in files.step.words.split()]
    return expected_seconds(files.step, words, probe)


def go(
    steps: Sequence[FirstStep],
    folder: Path,
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Takes steps until the time is over. A step that needs more than the remaining time is passed over.

    Steps that would only measure emulations are passed over as well. After each step, the archive has all files of
    the folder.
    """
    end = clock() + seconds
    probe = StepFiles(steps[0], folder)
    tried: set[str] = set()
    while True:
        remaining, device = end - clock(), probe.device()
        native = native_of(device)
        open_steps = [
            files
            for files in waiting(steps, folder)
            if files.step.name not in tried and not files.step.missing_units(native)
        ]
        expected = {files.step.name: seconds_of(files, device) for files in open_steps}
        files = next((files for files in open_steps if expected[files.step.name] <= remaining), None)
        is_blind = files is not None and files.step is not steps[0] and bool(probe.state()) and not device
        if files is None or is_blind:
            for waits in open_steps if not is_blind else ():
                name = waits.step.name
                say(f"{name}: left out, it takes {expected[name]:.0f} s and {max(0.0, remaining):.0f} s are left")
            return
        name = files.step.name
        # A step that takes far longer than its plan, for example because its groups start again, is continued in a
        # later call.
        most = max(_LEAST_LIMIT, _SLOWER * expected[name]) if "--brisk" in files.step.words else LONGEST
        state = take(files, min(LONGEST, remaining, most), native)
        files.write(files.state() | {"expected": round(expected[name])})
        tried.add(name)
        words = f"{name}: {state['state']} after {state['seconds']:.0f} s (computed {expected[name]:.0f})"
        say(f"{words}, exit {state['code']}; {max(0.0, end - clock()):.0f} s are left")
        archive(folder)


def archive(folder: Path) -> Path:
    """Writes all files of the folder into one archive in it, because a borrowed machine returns only a few files."""
    path, part = folder / ARCHIVE, folder / f"{ARCHIVE}.part"
    with tarfile.open(part, "w:gz") as file:
        for entry in sorted(folder.iterdir()):
            if entry.name not in _NOT_ARCHIVED:
                file.add(entry, entry.name)
    part.replace(path)
    return path


def unpack(path: Path, folder: Path) -> None:
    """Unpacks an archive of an earlier call into the folder. Raises SystemExit if it cannot be read, or if the folder
    already has steps.
    """
    if any(folder.glob("*.state.json")):
        raise SystemExit(f"--archive: {folder} holds steps already. Leave --archive out to go on with them.")
    try:
        with tarfile.open(path) as file:
            file.extractall(folder, filter="data")
    except (OSError, tarfile.TarError) as failure:
        raise SystemExit(f"--archive {path} could not be read ({failure}). Give the {ARCHIVE} of a call.") from None


def rows_of(every: Sequence[StepFiles]) -> list[Row]:
    """Returns a row for each line of each step. Speeds in low precision are withheld unless `conform` and `selftest`
    passed.
    """
    probe = every[0].device()
    nothing = "" if probe.get("computes") else "no GPU that computes was seen"
    rows, trusted = [], True
    for files, line in ((step, line) for step in every for line in step.step.lines):
        row = Row(*(word.replace("|", "/") for word in row_of(files, line, nothing, probe)))  # bars are the table's
        if files.step.name in ("conform", "selftest"):
            trusted &= row.verdict == "reached"
        if line.speed and not trusted and row.verdict in ("reached", "missed", "measured"):
            row = Row(line.what, row.target, "withheld", "could not be: conform and selftest have not held here")
        rows.append(row)
    return rows


def row_of(files: StepFiles, line: Line, nothing: str, probe: Mapping[str, Any]) -> Row:
    """Returns the row of a line: its figure with target, verdict and comparison, or why the figure is missing."""
    state = files.state()
    card = card_of(str(probe.get("device", {}).get("name", "")))
    target = line.target_words(card)
    try:
        if missing := files.step.missing_units(native_of(probe)):
            return Row(line.what, target, "-", f"left out: {missing}")
        if state.get("overruns", 0) >= _MOST_OVERRUNS:
            raise NoFigure(f"{_MOST_OVERRUNS} attempts were ended by a signal or after {LONGEST} s")
        if state.get("state") != "ended":
            waits = f"waits, takes {seconds_of(files, probe):.0f} s"
            return Row(line.what, target, "-", f"{waits}, cut off {state['attempts']} times" if state else waits)
        measured = line.read(files)
    except NoFigure as reason:
        return Row(line.what, target, "-", f"could not be: {reason}")
    except (ArithmeticError, LookupError, OSError, StopIteration, TypeError, ValueError, Fp8benchError) as failure:
        return Row(line.what, target, "-", f"could not be: read from its files, {type(failure).__name__}: {failure}")
    if nothing:
        return Row(line.what, target, measured.text, f"could not be: {nothing}")
    if measured.number is None:
        return Row(line.what, target, measured.text, "measured")
    verdict = "measured" if target == "-" else "reached" if line.reached(measured.number, card) else "missed"
    comparison = compared(measured.number, line.published, probe, files.clocks()) if line.published else ""
    return Row(line.what, target, measured.text, verdict, comparison)


def changes(every: Sequence[StepFiles], rows: Sequence[Row]) -> str:
    """Returns the new text for README.md, and for rows of docs/status.md."""
    device, verdicts = every[0].device(), iter(rows)
    if not device.get("computes"):
        return "Nothing changes: no GPU that computes was seen.\n"
    where = f"{device['device']['name']}, torch {device['torch']}, driver {device['driver'].get('driver_version', '?')}"
    texts_by_row: dict[str, list[str]] = {}
    for files in every:
        step_rows = [next(verdicts) for _ in files.step.lines]
        for row in files.step.rows:
            texts_by_row.setdefault(row, []).extend(f"{each.line}: {each.verdict}" for each in step_rows)
    table = {
        line.split(" | ")[0].removeprefix("| "): line for line in (ROOT / "docs" / "status.md").read_text().splitlines()
    }
    lines = [f"README.md, Status: run on {where}, at {device['commit']}.", ""]
    for row, verdict in texts_by_row.items():
        done = all(words.endswith((": reached", ": measured")) for words in verdict)
        words = f"run on {where}" if done else f"**tried on {where}**: {'; '.join(verdict)}"
        lines += [f"- {table[row]}", f"+ {table[row].replace('**not run yet**', words, 1)}", ""]
    return "\n".join(lines)


def closing(steps: Sequence[FirstStep], folder: Path) -> int:
    """Prints and stores the table and the changes. Returns 1 unless every line is reached or measured."""
    every = [StepFiles(step, folder) for step in steps]
    rows = rows_of(every)
    lines = [*remarks(every[0].device()), "", "| line | target | measured | verdict | others published |"]
    lines += ["|---|---|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)]
    text = "\n".join(lines).lstrip() + "\n"
    write_whole(folder / "table.md", text)
    write_whole(folder / "changes.md", changes(every, rows))
    archive(folder)
    say(text + f"\nwhat changes in README.md and docs/status.md: {folder / 'changes.md'}")
    return EXIT_OK if all(row.verdict in ("reached", "measured") for row in rows) else EXIT_FAILED


def chosen(steps: Sequence[FirstStep], only: str | None) -> list[FirstStep]:
    """Returns the probe and the named steps, in the order of the names. Raises SystemExit for an unknown name."""
    if not only:
        return [*steps]
    steps_by_name = {step.name: step for step in steps}
    names = [name for name in only.split(",") if name]
    if unknown := [name for name in names if name not in steps_by_name]:
        raise SystemExit(f"--only: unknown step {unknown[0]!r}. Choose of {', '.join(steps_by_name)}.")
    return [steps_by_name[name] for name in dict.fromkeys([steps[0].name, *names])]


def forget(steps: Sequence[FirstStep], names: Sequence[str], folder: Path) -> None:
    """Deletes all files of these steps. Raises SystemExit for an unknown name."""
    files_by_name = {step.name: StepFiles(step, folder) for step in steps}
    if unknown := [name for name in names if name not in files_by_name]:
        raise SystemExit(f"--again: unknown step {unknown[0]!r}. Choose of {', '.join(files_by_name)}.")
    for name in names:
        shutil.rmtree(files_by_name[name].store, ignore_errors=True)
        for path in folder.glob(f"{name}.*"):
            path.unlink()


def main() -> int:
    asked = options(
        __doc__,
        minutes=(9.0, "that it may take"),
        out=(Path, "the folder; of an earlier start, to go on"),
        again=(str, "steps to repeat, separated by commas"),
        only=(str, "these steps alone, with commas, in this order; the probe comes first"),
        brisk=(False, "the steps that answer what is open, for a GPU that is lent for minutes"),
        archive=(Path, f"an earlier call's {ARCHIVE}, to go on with in a new folder"),
    )
    if asked.out is None:
        raise SystemExit("--out names the folder of results and was not given. Give --out FOLDER.")
    asked.out.mkdir(parents=True, exist_ok=True)
    with (asked.out / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SystemExit(
                f"{asked.out} is in use by a different process. Wait for it, or give a different --out."
            ) from None
        steps = chosen(BRISK_STEPS if asked.brisk else STEPS, asked.only)
        if asked.archive is not None:
            unpack(asked.archive, asked.out)
        forget(steps, asked.again.split(",") if asked.again else [], asked.out)
        # The minutes include the time to interrupt the last step.
        go(steps, asked.out, 60 * asked.minutes - _GRACE * asked.brisk)
        return closing(steps, asked.out)


if __name__ == "__main__":
    sys.exit(main())
