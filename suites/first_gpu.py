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
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from fp8bench.errors import EXIT_FAILED, EXIT_OK, EXIT_USAGE, Fp8benchError
from fp8bench.files import write_whole
from suites.first_gpu_brisk import BRISK_STEPS, STEPS, expected_seconds
from suites.first_gpu_cards import card_of_probe, compare, describe_conditions
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
        words = [*words[:2], "--resume", begun[-1].stem.split("-")[-1]]
        if kind == "train":
            words.append("--json")
    if kind == "suite":
        words += ["--csv", str(files.path("csv")), "--no-report"]
    if kind in _STORED:
        words += ["--store", str(files.store)]
    return [sys.executable, "-m", *(only_native(word, native) for word in words)]


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
    state |= {"commit": commit, "command": command[1:], "begun": datetime.now(UTC).isoformat()}
    state["attempts"] += 1
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
    if state["code"] == EXIT_USAGE and "--resume" in command:
        # Files have changed: the two parts would not be comparable.
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


def find_open_steps(steps: Sequence[FirstStep], folder: Path) -> list[StepFiles]:
    """Returns the steps that have not ended, in their order."""
    steps_files = (StepFiles(step, folder) for step in steps)
    return [files for files in steps_files if files.state().get("state") != "ended"]


def native_of(probe: Mapping[str, Any]) -> dict[str, str]:
    """Returns for each precision whether the probed device multiplies it: 'native', 'emulated' or 'refused'."""
    return {name: level for name, (level, _) in probe.get("precisions", {}).items()}


def seconds_of(files: StepFiles, probe: Mapping[str, Any]) -> float:
    """Returns the seconds of a step, computed from its plan on the probed device, or else its usual seconds."""
    if "--brisk" not in files.step.words:
        return files.step.seconds
    words = [only_native(word, native_of(probe)) for word in files.step.words.split()]
    return expected_seconds(files.step, words, probe)


def run_steps(
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
        open_steps = {}
        for files in find_open_steps(steps, folder):
            if files.step.name not in tried and not files.step.missing_units(native):
                open_steps[files.step.name] = files, seconds_of(files, device)
        fitting = [name for name, (_, seconds) in open_steps.items() if seconds <= remaining]
        if not fitting:
            for name, (_, seconds) in open_steps.items():
                say(f"{name}: left out, it takes {seconds:.0f} s and {max(0.0, remaining):.0f} s are left")
            return
        name = fitting[0]
        if name != steps[0].name and probe.state() and not device:
            return  # the probe has found no GPU
        files, expected = open_steps[name]
        # A step that takes far longer than its plan, for example because its groups start again, is continued in a
        # later call.
        most = max(_LEAST_LIMIT, _SLOWER * expected) if "--brisk" in files.step.words else LONGEST
        state = take(files, min(LONGEST, remaining, most), native)
        files.write(files.state() | {"expected": round(expected)})
        tried.add(name)
        words = f"{name}: {state['state']} after {state['seconds']:.0f} s (computed {expected:.0f})"
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
        raise SystemExit(f"--archive: {folder} already holds steps. Leave --archive out to continue them.")
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
    rows, is_trusted = [], True
    for files in every:
        for line in files.step.lines:
            row = make_row(files, line, probe)
            row = Row(*(word.replace("|", "/") for word in row))  # bars are the table's
            if files.step.name in ("conform", "selftest"):
                is_trusted &= row.verdict == "reached"
            if line.speed and not is_trusted and row.verdict in ("reached", "missed", "measured"):
                row = Row(line.what, row.target, "withheld", "could not be: conform and selftest have not held here")
            rows.append(row)
    return rows


def make_row(files: StepFiles, line: Line, probe: Mapping[str, Any]) -> Row:
    """Returns the row of a line: its figure with target, verdict and comparison, or why the figure is missing."""
    card = card_of_probe(probe)
    row = Row(line.what, line.target_words(card), "-", "measured")
    try:
        if open_reason := find_open_reason(files, probe):
            return row._replace(verdict=open_reason)
        measured = line.read(files)
    except NoFigure as reason:
        return row._replace(verdict=f"could not be: {reason}")
    except (ArithmeticError, LookupError, OSError, StopIteration, TypeError, ValueError, Fp8benchError) as failure:
        return row._replace(verdict=f"could not be: read from its files, {type(failure).__name__}: {failure}")
    row = row._replace(measured=measured.text)
    if not probe.get("computes"):
        return row._replace(verdict="could not be: no GPU that computes was seen")
    if measured.number is None:
        return row
    if row.target != "-":
        row = row._replace(verdict="reached" if line.reached(measured.number, card) else "missed")
    if line.published:
        row = row._replace(published=compare(measured.number, line.published, probe, files.clocks()))
    return row


def find_open_reason(files: StepFiles, probe: Mapping[str, Any]) -> str:
    """Returns why a step has not ended; '' if it has."""
    state = files.state()
    if missing := files.step.missing_units(native_of(probe)):
        return f"left out: {missing}"
    if state.get("overruns", 0) >= _MOST_OVERRUNS:
        return f"could not be: {_MOST_OVERRUNS} attempts were ended by a signal or after {LONGEST} s"
    if state.get("state") == "ended":
        return ""
    cuts = f", cut off {state['attempts']} times" if state else ""
    return f"waits, takes {seconds_of(files, probe):.0f} s{cuts}"


def changes(every: Sequence[StepFiles], rows: Sequence[Row]) -> str:
    """Returns the new text for README.md, and for rows of docs/status.md."""
    device, remaining_rows = every[0].device(), iter(rows)
    if not device.get("computes"):
        return "Nothing changes: no GPU that computes was seen.\n"
    where = f"{device['device']['name']}, torch {device['torch']}, driver {device['driver'].get('driver_version', '?')}"
    verdicts_by_row: dict[str, list[str]] = {}
    for files in every:
        verdicts = [f"{row.line}: {row.verdict}" for row in islice(remaining_rows, len(files.step.lines))]
        for row in files.step.rows:
            verdicts_by_row.setdefault(row, []).extend(verdicts)
    status_lines = (ROOT / "docs" / "status.md").read_text().splitlines()
    table = {line.split(" | ")[0].removeprefix("| "): line for line in status_lines}
    lines = [f"README.md, Status: run on {where}, at {device['commit']}.", ""]
    for row, verdicts in verdicts_by_row.items():
        is_done = all(verdict.endswith((": reached", ": measured")) for verdict in verdicts)
        words = f"run on {where}" if is_done else f"**tried on {where}**: {'; '.join(verdicts)}"
        lines += [f"- {table[row]}", f"+ {table[row].replace('**not run yet**', words, 1)}", ""]
    return "\n".join(lines)


def write_results(steps: Sequence[FirstStep], folder: Path) -> int:
    """Prints and stores the table and the changes. Returns 1 unless every line is reached or measured."""
    every = [StepFiles(step, folder) for step in steps]
    rows = rows_of(every)
    lines = [*describe_conditions(every[0].device()), "", "| line | target | measured | verdict | others published |"]
    lines += ["|---|---|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)]
    text = "\n".join(lines).lstrip() + "\n"
    write_whole(folder / "table.md", text)
    write_whole(folder / "changes.md", changes(every, rows))
    archive(folder)
    say(text + f"\nwhat changes in README.md and docs/status.md: {folder / 'changes.md'}")
    return EXIT_OK if all(row.verdict in ("reached", "measured") for row in rows) else EXIT_FAILED


def find_steps(steps: Sequence[FirstStep], words: str | None, option: str) -> list[FirstStep]:
    """Returns the steps with these names, which commas separate. Raises SystemExit for an unknown name."""
    steps_by_name = {step.name: step for step in steps}
    names = [name for name in (words or "").split(",") if name]
    if unknown := [name for name in names if name not in steps_by_name]:
        raise SystemExit(f"{option}: unknown step {unknown[0]!r}. Choose of {', '.join(steps_by_name)}.")
    return [steps_by_name[name] for name in names]


def choose_steps(steps: Sequence[FirstStep], only: str | None) -> list[FirstStep]:
    """Returns the probe and the named steps, in the order of the names; without names all steps."""
    named_steps = find_steps(steps, only, "--only")
    return [*dict.fromkeys([steps[0], *named_steps])] if named_steps else [*steps]


def forget(steps: Sequence[FirstStep], names: str | None, folder: Path) -> None:
    """Deletes all files of these steps."""
    for step in find_steps(steps, names, "--again"):
        shutil.rmtree(StepFiles(step, folder).store, ignore_errors=True)
        for path in folder.glob(f"{step.name}.*"):
            path.unlink()


def main() -> int:
    asked = options(
        __doc__,
        minutes=(9.0, "time limit in minutes"),
        out=(Path, "folder of the results; with the folder of an earlier call, continues it"),
        again=(str, "steps to repeat, separated by commas"),
        only=(str, "only these steps, separated by commas, in this order; the probe comes first"),
        brisk=(False, "only the first steps, which answer the open questions, for a GPU that is lent for minutes"),
        archive=(Path, f"{ARCHIVE} of an earlier call, to continue it in a new folder"),
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
        steps = choose_steps(BRISK_STEPS if asked.brisk else STEPS, asked.only)
        if asked.archive is not None:
            unpack(asked.archive, asked.out)
        forget(steps, asked.again, asked.out)
        # The minutes include the time to interrupt the last step.
        run_steps(steps, asked.out, 60 * asked.minutes - _GRACE * asked.brisk)
        return write_results(steps, asked.out)


if __name__ == "__main__":
    sys.exit(main())
