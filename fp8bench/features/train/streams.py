"""Streams of `fp8bench.watch`: read, and put side by side as the arms of a training, so that its pages show them.

Streams of several seeds are one loop. Speed is shown and never compared: what else ran on a machine is unknown.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fp8bench.errors import RunNotFound, UsageError
from fp8bench.features.train.lines import is_line, line_of
from fp8bench.features.train.request import TrainerSettings, TrainingRequest
from fp8bench.features.train.values import (
    WATCHED,
    Arm,
    ArmRole,
    Lines,
    StepRow,
    StreamLine,
    TokenSpan,
    Training,
    TrainingText,
    WatchedLoops,
)
from fp8bench.files import is_no_folder, open_file, read_file
from fp8bench.model import DeviceFacts, Environment

# A longer first line is not one of a stream.
_LONGEST_LINE = 1 << 16
_LONGEST_NAME = 100


def is_stream(path: Path) -> bool:
    """Whether the file begins with a line of `fp8bench.watch`."""
    with contextlib.suppress(OSError, ValueError):
        if is_no_folder(path):
            with open_file(path) as file:
                return is_line(json.loads(file.readline(_LONGEST_LINE)))
    return False


def read_stream(path: Path) -> list[StreamLine]:
    """Returns the lines of a stream, without a truncated last one. Raises UsageError if it has no step."""
    try:
        texts = read_file(path).decode().splitlines()
    except OSError as error:
        raise RunNotFound(f"the stream {path} cannot be read ({error.strerror}).") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not a stream of fp8bench.watch: it is not text.") from None
    lines = []
    for number, text in enumerate(texts, 1):
        try:
            lines.append(line_of(json.loads(text)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            # A killed loop may leave a truncated last line.
            if number == len(texts) and number > 1:
                break
            raise UsageError(
                f"line {number} of {path} is not from a stream of fp8bench.watch ({error!s:.80})."
            ) from None
    if not any(isinstance(line, StepRow) for line in lines):
        raise UsageError(f"{path} has no row of a step: its loss was never seen. Its events may say why.")
    return lines


def loops_of(files: Sequence[Sequence[Path]], margin: float = 0.01) -> WatchedLoops:
    """Returns loops as the arms of a training. `files` has a list for each loop, with a file for each seed; the first
    loop is the reference. `margin` is a share. Raises UsageError for unequal numbers of seeds."""
    if not all(files):
        raise UsageError("a list of streams is empty. Give a file for each seed.")
    counts = sorted(set(map(len, files)))
    if len(counts) > 1:
        raise UsageError(
            f"streams of {' and '.join(map(str, counts))} seeds cannot be paired. Give equally many files for each."
        )
    streams = [list(map(read_stream, paths)) for paths in files]
    names = _names(files, streams)
    lines: list[StreamLine] = []
    for name, seeds in zip(names, streams, strict=True):
        for seed, seed_lines in enumerate(seeds):
            lines += [replace(line, arm=name, seed=seed) for line in seed_lines]
    steps = 1 + max(line.step for line in lines if line.arm == names[0] and isinstance(line, StepRow))
    file_name = "+".join(paths[0].stem for paths in files)[:_LONGEST_NAME]
    path = files[0][0].with_name(f"{file_name}.jsonl")
    training = watched_training(f"{path.resolve().parent.name}-{file_name}", names, steps, counts[0], margin)
    return WatchedLoops(training, tuple(lines), True, str(path))


def watched_training(
    identity: str, names: Sequence[str], steps: int = 1, seeds: int = 1, margin: float = 0.01
) -> Training:
    """Returns the training that stands for loops: their precisions, device, text and command are unknown."""
    nothing = TokenSpan("", 0, 0)
    arms = [Arm(names[0], "", ArmRole.REFERENCE), *(Arm(name, "") for name in names[1:])]
    request = TrainingRequest(settings=TrainerSettings(make=WATCHED), steps=steps, seeds=seeds, margin=margin)
    text = TrainingText(nothing, nothing, 0, WATCHED, "")
    facts = DeviceFacts("", 0, "", 0, "")
    return Training(identity, "", "", request, tuple(arms), facts, Environment({}), text, 0)


def _names(files: Sequence[Sequence[Path]], streams: Sequence[Sequence[Lines]]) -> list[str]:
    """Returns the loops' names; if some are equal, those of their files, and if these are equal, numbered ones."""
    stems = [paths[0].stem for paths in files]
    for candidates in ([seeds[0][0].arm for seeds in streams], stems):
        if len(set(candidates)) == len(candidates):
            return candidates
    return [f"{stem} {place}" for place, stem in enumerate(stems, 1)]
