"""Reads streams that `fp8bench.watch` has written, and shows them as the arms of one training.

The streams of several seeds count as one loop. Speed is shown but never compared, because other programs may have run
on the machine.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fp8bench.errors import RunNotFound, UsageError
from fp8bench.features.train.lines import is_stream_line_content, line_from_json
from fp8bench.features.train.request import TrainerSettings, TrainingRequest
from fp8bench.features.train.values import (
    WATCHED_NAME,
    Arm,
    ArmRole,
    Lines,
    StepRow,
    StreamLine,
    Training,
    WatchedLoops,
    make_empty_text,
)
from fp8bench.files import is_not_folder, open_file, parse_json, read_file
from fp8bench.model import DeviceFacts, Environment

# A file with a longer first line, in bytes, was not written by `fp8bench.watch`.
_MAX_LINE_LENGTH = 1 << 16
_MAX_NAME_LENGTH = 100


def is_stream_file(path: Path) -> bool:
    """Returns whether the file begins with a line of `fp8bench.watch`."""
    with contextlib.suppress(OSError, ValueError):
        if is_not_folder(path):
            with open_file(path) as file:
                return is_stream_line_content(parse_json(file.readline(_MAX_LINE_LENGTH)))
    return False


def read_stream(path: Path) -> list[StreamLine]:
    """Returns the lines of a stream. An incomplete last line is left out. Raises UsageError if the stream has no
    step.
    """
    try:
        texts = read_file(path).decode().splitlines()
    except OSError as error:
        raise RunNotFound(f"the stream {path} cannot be read ({error.strerror}).") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not a stream of fp8bench.watch: it is not text.") from None
    lines = []
    for line_number, text in enumerate(texts, 1):
        try:
            lines.append(line_from_json(parse_json(text)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            # A killed loop may leave a last line that is cut off.
            if line_number == len(texts) and line_number > 1:
                break
            raise UsageError(
                f"line {line_number} of {path} is not from a stream of fp8bench.watch ({error!s:.80})."
            ) from None
    if not any(isinstance(line, StepRow) for line in lines):
        raise UsageError(f"{path} has no row of a step: its loss was never seen. Its events may say why.")
    return lines


def load_recorded_loops(files: Sequence[Sequence[Path]], margin: float = 0.01) -> WatchedLoops:
    """Returns recorded loops as the arms of a training. `files` has a list for each loop, with one file for each
    seed. The first loop is the reference. `margin` is the tolerated share of the reference's loss. Raises UsageError
    if loops have different numbers of seeds.
    """
    if not all(files):
        raise UsageError("a list of streams is empty. Give a file for each seed.")
    seed_counts = sorted(set(map(len, files)))
    if len(seed_counts) > 1:
        raise UsageError(
            f"streams of {' and '.join(map(str, seed_counts))} seeds cannot be paired. Give equally many files for "
            "each."
        )
    streams_by_loop = [list(map(read_stream, paths)) for paths in files]
    names = _make_loop_names(files, streams_by_loop)
    lines: list[StreamLine] = []
    for name, seeds in zip(names, streams_by_loop, strict=True):
        for seed, seed_lines in enumerate(seeds):
            lines += [replace(line, arm=name, seed=seed) for line in seed_lines]
    # Steps are counted from 0. The first loop is the reference.
    steps = 1 + max(line.step for line in lines if line.arm == names[0] and isinstance(line, StepRow))
    file_name = "+".join(paths[0].stem for paths in files)[:_MAX_NAME_LENGTH]
    path = files[0][0].with_name(f"{file_name}.jsonl")
    training = make_watched_training(f"{path.resolve().parent.name}-{file_name}", names, steps, seed_counts[0], margin)
    return WatchedLoops(training, tuple(lines), True, str(path))


def make_watched_training(
    identity: str, names: Sequence[str], steps: int = 1, seeds: int = 1, margin: float = 0.01
) -> Training:
    """Returns a placeholder training whose arms are recorded loops. Their precisions, device, text and command are
    unknown.
    """
    arms = [Arm(names[0], "", ArmRole.REFERENCE), *(Arm(name, "") for name in names[1:])]
    request = TrainingRequest(settings=TrainerSettings(make=WATCHED_NAME), steps=steps, seeds=seeds, margin=margin)
    text = make_empty_text(WATCHED_NAME)
    facts = DeviceFacts("", 0, "", 0, "")
    return Training(identity, "", "", request, tuple(arms), facts, Environment({}), text, 0)


def _make_loop_names(files: Sequence[Sequence[Path]], streams: Sequence[Sequence[Lines]]) -> list[str]:
    """Returns a different name for each loop: the names that the streams contain or, if two of these are equal, the
    names of the files. Equal file names get numbers. A loop with several seeds gets the common part of their names.
    """
    file_names = [_join_names([path.stem for path in paths]) for paths in files]
    for candidates in ([_join_names([seed_lines[0].arm for seed_lines in seeds]) for seeds in streams], file_names):
        if len(set(candidates)) == len(candidates):
            return candidates
    return [f"{stem} {place}" for place, stem in enumerate(file_names, 1)]


def _join_names(names: Sequence[str]) -> str:
    """Returns the name of a loop whose seeds have these names, such as 'fp8' for the seeds 'fp8-0' and 'fp8-1'. If all
    seeds have the same name, returns it unchanged.
    """
    return re.sub(r"[-_.]?\d+$", "", names[0]) if len(set(names)) > 1 else names[0]
