"""The start of a training: its texts, and weights or scales from elsewhere.

A text becomes 16-bit tokens, one per byte; token files in nanoGPT's format are mapped in place. The last tenth is held
out, after a gap of one window, unless the text has a separate held-out part. Names in a request are resolved and stored
in it, so that a resumed training begins with the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fp8bench.errors import UsageError
from fp8bench.features.train.kind import KIND, find_training, load_head, load_training, newest_checkpoint
from fp8bench.features.train.lab.models import config_of, layers_of
from fp8bench.features.train.request import TrainingRequest, file_of
from fp8bench.features.train.tasks import TASK_TEXT, text_of
from fp8bench.features.train.values import LayerReading, TokenSpan, TrainingText
from fp8bench.files import MEMORY_BYTES, check_file, open_file, read_file
from fp8bench.plan.corpus import byte_tokens, name_of, named_text, replace_tokens
from fp8bench.protocols import TensorScale
from fp8bench.registry import precisions
from fp8bench.store.runs.listing import largest_scales, load_stored_run, refuse_no_scales, scales_of

# At most this many bytes of a text are read; longer ones can be given as token files.
MOST_TEXT = 128 << 20
# One part in this many is held out.
_PARTS = 10
# With fewer validation windows, losses would mean nothing.
LEAST_WINDOWS = 4
_BYTES_A_TOKEN = 2
_CHUNK = 1 << 24
# The largest file of tokens: all of it is read for its digest, and no training here needs a hundredth of this.
_LARGEST_TOKENS = 32 << 30
# Names of the held-out split in a saved dataset, by preference.
_HELD_OUT_SPLITS = ("validation", "valid", "test")


@dataclass(frozen=True)
class _Source:
    """A text in two parts. `whole`: both are consecutive parts of one text."""

    name: str
    train: bytes
    held_out: bytes
    whole: bool = True

    @classmethod
    def divide(cls, name: str, text: bytes) -> _Source:
        place = len(text) - len(text) // _PARTS
        return cls(name, text[:place], text[place:])


def prepare_text(data: str | None, folder: Path, sequence: int) -> TrainingText:
    """Returns the text; token files are created in `folder`, once per text. Raises UsageError if it is missing or too
    short."""
    # 1. Map existing tokens; 2. convert everything else to tokens first.
    files = None if data is None else _token_files(Path(data))
    if data is not None and data.startswith(TASK_TEXT):
        text = _tokenize(_Source(*text_of(data, sequence), whole=False), folder, sequence)
        # Documents of tasks are as long as a window, and a window must begin with one.
        text = replace(text, train=replace(text.train, every=sequence))
    elif files is None:
        text = _tokenize(_source(data), folder, sequence)
    else:
        text = _map_tokens(files, sequence)
    # A text that is too short would be validated on its training part.
    title = "Python's own sources" if data is None else f"--data {data}"
    _check_length(f"{title}: the part to train on", text.train, sequence)
    _check_length(f"{title}: the held-out part", text.held_out, sequence)
    return text


def _check_length(title: str, span: TokenSpan, sequence: int) -> None:
    length, needed = max(0, span.stop - span.start), LEAST_WINDOWS * sequence + 1
    if length < needed:
        raise UsageError(
            f"{title} has {length} tokens, and needs {needed}. Give a longer text, or a shorter --sequence."
        )


def _tokenize(source: _Source, folder: Path, sequence: int) -> TrainingText:
    text = source.train + source.held_out
    # The digest names the file: equal texts share it, and an edited text gets another.
    digest, trained = hashlib.sha256(text).hexdigest(), len(source.train)
    path, tokens = folder / f"{digest[:16]}.tokens", byte_tokens(text)
    if not path.is_file() or read_file(path) != tokens:  # a crash may leave a wrong file of the right length
        replace_tokens(path, tokens)
    # The gap of one window keeps windows of the two parts apart.
    name, begun = str(path.resolve()), trained + (sequence if source.whole else 0)
    held_out = TokenSpan(name, begun, len(text))
    return TrainingText(TokenSpan(name, 0, trained), held_out, 256, "bytes", f"{source.name}:{digest[:8]}")


def _source(data: str | None) -> _Source:
    if data is None or not Path(data).is_dir():
        text, name = named_text(data, MOST_TEXT)
        return _Source.divide(name, text)
    folder = Path(data)
    if (folder / "state.json").is_file():
        return _Source.divide(name_of(data), _dataset_text(folder))
    notes = folder / "dataset_dict.json"
    splits = _json_of(notes).get("splits", []) if notes.is_file() else []
    if "train" not in splits:
        raise UsageError(
            f"--data {data} is a folder without train.bin, and not a saved dataset with a part 'train'. Give a text "
            "file, a .bin, or what save_to_disk of Hugging Face's datasets wrote."
        )
    text = _dataset_text(folder / "train")
    held_out = next((split for split in _HELD_OUT_SPLITS if split in splits), None)
    if held_out is None:
        return _Source.divide(name_of(data), text)
    return _Source(name_of(data), text, _dataset_text(folder / held_out), whole=False)


def _json_of(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_file(path))
    except (OSError, ValueError) as error:
        raise UsageError(f"--data: {path} cannot be read ({error}). Save the dataset again.") from None
    return content if isinstance(content, dict) else {}


def _dataset_text(folder: Path) -> bytes:
    """Returns the documents of a saved dataset, each with a line break; the first MOST_TEXT bytes."""
    parts, total = [], 0
    for document in _documents(folder):
        parts.append(f"{document}\n".encode(errors="replace"))
        total += len(parts[-1])
        if total >= MOST_TEXT:
            break
    return b"".join(parts)[:MOST_TEXT]


def _documents(folder: Path) -> Iterator[str]:
    """Yields the text column of each row: 'text', or the only column of strings."""
    try:
        import pyarrow
    except ImportError:
        raise UsageError(
            f"--data {folder} is a saved dataset, which pyarrow reads: pip install pyarrow, or give a text file."
        ) from None
    try:
        files = [str(entry["filename"]) for entry in _json_of(folder / "state.json")["_data_files"]]
    except (KeyError, TypeError):
        raise UsageError(f"--data: {folder / 'state.json'} names no files. Save the dataset again.") from None
    for name in files:
        try:
            check_file(folder / name, most=None)
            with pyarrow.memory_map(str(folder / name)) as mapped, pyarrow.ipc.open_stream(mapped) as stream:
                fields = [field.name for field in stream.schema if str(field.type) in ("string", "large_string")]
                column = "text" if "text" in fields else fields[0] if len(fields) == 1 else None
                if column is None:
                    raise UsageError(
                        f"--data {folder} has columns {', '.join(stream.schema.names)}: none is called text, and not "
                        "exactly one holds strings. Keep one such column, and save it again."
                    )
                for rows in stream:
                    yield from (value.as_py() or "" for value in rows.column(column))
        except (OSError, pyarrow.ArrowException) as error:
            raise UsageError(f"--data: {folder / name} cannot be read ({error}). Save the dataset again.") from None


def _token_files(data: Path) -> tuple[Path, Path | None] | None:
    """Returns a token file and its held-out file, as nanoGPT names them; None for anything else."""
    train = data / "train.bin" if (data / "train.bin").is_file() else data
    if train.suffix != ".bin" or train.is_dir():
        return None
    held_out = train.with_name("val.bin")
    return train, held_out if train.name == "train.bin" and held_out.is_file() else None


def _map_tokens(files: tuple[Path, Path | None], sequence: int) -> TrainingText:
    """Maps token files in place. The vocabulary ends with their highest token."""
    train, val = files
    length, highest, digest = _read_tokens(train)
    if val is None:
        cut = length - length // _PARTS
        held_out = TokenSpan(str(train.resolve()), cut + sequence, length)
        length = cut
    else:
        # A validation file may use tokens that the training file lacks.
        stop, high, held_out_digest = _read_tokens(val)
        held_out = TokenSpan(str(val.resolve()), 0, stop)
        highest, digest = max(highest, high), hashlib.sha256((digest + held_out_digest).encode()).hexdigest()
    name = name_of(str(train.parent if train.name == "train.bin" else train))
    return TrainingText(
        TokenSpan(str(train.resolve()), 0, length), held_out, highest + 1, "given", f"{name}:{digest[:8]}"
    )


def _read_tokens(path: Path) -> tuple[int, int, str]:
    import numpy as np

    try:
        if path.suffix != ".bin" or path.stat().st_size % _BYTES_A_TOKEN:
            raise UsageError(f"--data {path} is not a file of 16-bit tokens. Give a .bin as nanoGPT writes it.")
        digest, highest, length = hashlib.sha256(), 0, 0
        with open_file(path, most=_LARGEST_TOKENS) as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
                highest = max(highest, int(np.frombuffer(chunk, dtype=np.uint16).max()))
                length += len(chunk) // _BYTES_A_TOKEN
    except OSError as error:
        raise UsageError(
            f"--data {path} cannot be read ({error.strerror}). Give a .bin as nanoGPT writes it."
        ) from None
    return length, highest, digest.hexdigest()


def started_from(request: TrainingRequest, store: Path) -> TrainingRequest:
    """Replaces 'TRAINING' or 'TRAINING:ARM' in --start by its checkpoint, and adds a file's digest: a resumed training
    must read the same. Raises UsageError."""
    if not request.settings.start:
        return request
    if (file := file_of(request.settings.start)) is not None:
        return replace(request, settings=replace(request.settings, start=f"{file.resolve()}::{_digest_of(file)}"))
    word, _, arm_name = request.settings.start.partition(":")
    # A request stores its start as a file with its digest, so that a resumed training can verify it.
    path = find_training(word, store)
    training, checkpoint = load_head(path), newest_checkpoint(path)
    trained_with, arm = training.request.settings, arm_name or training.arms[0].name
    refusals = (
        (
            arm not in [known_arm.name for known_arm in training.arms],
            f"it has no arm {arm!r:.80}, but {', '.join(known_arm.name for known_arm in training.arms)}",
        ),
        (
            bool(trained_with.make) or trained_with.parallel not in ("", "ddp") or trained_with.master != "fp32",
            (
                "whole fp32 weights of a built-in model are needed: no --make, no --parallel but ddp, "
                "and no other --master"
            ),
        ),
        (
            (trained_with.arch, trained_with.model) != (request.settings.arch, request.settings.model),
            f"it trained --arch {trained_with.arch} --model {trained_with.model}",
        ),
        (checkpoint is None, f"it has no checkpoint: {training.request.steps} steps, --keep {training.request.keep}"),
    )
    for wrong, reason in refusals:
        if wrong:
            raise UsageError(f"--start {word}: {reason}. Choose another training or arm.")
    assert checkpoint is not None
    # Ranks that only divide the batch have the same weights, so any of them can be used.
    folder = checkpoint[0] / "rank-0" if training.request.ranks else checkpoint[0]
    return replace(request, settings=replace(request.settings, start=f"{folder}::{arm}"))


def with_scales(request: TrainingRequest, store: Path) -> TrainingRequest:
    """Adds the scales of the training or run in --scales-from; a training's are those of its last watched steps. Raises
    UsageError if no layer could have scales from data."""
    settings, swept = request.settings, dict(request.sweep)
    renewed = (
        settings.refresh_scales,
        settings.saturation_bound,
        swept.get("refresh-scales"),
        swept.get("saturation-bound"),
    )
    if request.settings.scales or (request.scales_from is None and not any(value is not None for value in renewed)):
        return request
    words = {*request.dtypes, *dict(request.settings.precision_map).values()}
    if all(precisions.get(word).tensor_scale is TensorScale.NONE for word in words):
        having = [name for name in precisions.names() if precisions.get(name).tensor_scale is not TensorScale.NONE]
        raise UsageError(
            "scales from data would have no effect: no layer of these dtypes has one float32 scale for a tensor. Add a "
            f"dtype that has ({', '.join(having)}), or leave the option out."
        )
    if request.scales_from is None:
        return request
    # 'last' means the last training; a run must be named.
    last, word = request.scales_from == "last", request.scales_from
    path = find_training(word, store) if last else KIND.find(word, store)
    if path is None:
        run = load_stored_run(word, store)
        scales, of = scales_of(run), f"run {run.id}"
    else:
        stored = load_training(path)
        modes = {arm.name: arm.precision for arm in stored.training.arms}
        # The last reading of each tensor replaces earlier ones.
        amaxes = {(line.arm, line.seed, line.layer, line.role): line.amax for line in stored.of(LayerReading)}
        above_0 = ((modes[arm], layer, role, amax) for (arm, _, layer, role), amax in amaxes.items() if amax > 0)
        scales = largest_scales(above_0)
        of = f"training {stored.training.id}"
    settings = replace(request.settings, scales=refuse_no_scales(scales, of))
    named = {layer for _, layer, *_ in scales}
    if settings.make:  # only the worker knows and checks its layers
        return replace(request, settings=settings)
    for layer in layers_of(settings.arch, config_of(settings, 1)):
        if not layer.high and layer.name not in named:
            raise UsageError(f"--scales-from: {of} has no scale for {layer.name}, a layer of --model {settings.model}.")
    return replace(request, settings=settings)


def _digest_of(file: Path) -> str:
    try:
        with open_file(file, most=MEMORY_BYTES) as content:
            return hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as error:
        raise UsageError(f"--start {file} cannot be read ({error.strerror}). Give a file with a state dict.") from None
