"""Prepares the start of a training: its text, and its initial weights or scales. A text becomes 16-bit tokens, one per
byte. Token files in nanoGPT's format are mapped in place. The last tenth is held out, after a gap of one window, unless
the text has a separate held-out part. The names that --start and --scales-from give are replaced in the request by the
path of the weights and by the scales themselves, so that a resumed training begins in the same way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fp8bench.errors import UsageError
from fp8bench.features.train.kind import KIND, find_training, load_training, load_training_header, newest_checkpoint
from fp8bench.features.train.lab.models import list_layers, make_config
from fp8bench.features.train.request import TrainingRequest, find_start_weights_file
from fp8bench.features.train.tasks import TASK_TEXT_PREFIX, make_task_text
from fp8bench.features.train.values import LayerReading, TokenSpan, TrainingTokens
from fp8bench.files import MEMORY_BYTES, check_file, open_file, parse_json, read_file
from fp8bench.plan.corpus import make_byte_tokens, name_user_corpus, read_named_text, replace_tokens
from fp8bench.protocols import TensorScale
from fp8bench.registry import precisions
from fp8bench.store.runs.listing import collect_scales, load_stored_run, merge_largest_scales, require_scales

# At most this many bytes of a text are read. Longer texts can be given as token files.
MAX_TEXT_BYTES = 128 << 20
# One tenth of a text is held out.
_HELD_OUT_PARTS = 10
# With fewer than four validation windows, losses would be meaningless.
MIN_WINDOWS = 4
_BYTES_PER_TOKEN = 2
# Larger token files are refused. A file is read completely for its digest, and no training here needs a hundredth of
# this size.
_MAX_TOKEN_BYTES = 32 << 30
# Names of the held-out part of a saved dataset, in order of preference.
_HELD_OUT_SPLITS = ("validation", "valid", "test")


@dataclass(frozen=True)
class _SplitText:
    """A text in two parts: one for training, one held out. `is_single_text` means that the held-out part follows
    directly after the first part in the same text.
    """

    name: str
    train: bytes
    held_out: bytes
    is_single_text: bool = True

    @classmethod
    def split_held_out_text(cls, name: str, text: bytes) -> _SplitText:
        train_byte_count = len(text) - len(text) // _HELD_OUT_PARTS
        return cls(name, text[:train_byte_count], text[train_byte_count:])


def prepare_text(data: str | None, folder: Path, sequence: int) -> TrainingTokens:
    """Returns the text of a training. Token files are created in `folder`, once per text. Raises UsageError if the
    text is missing or too short."""
    # Token files are mapped. Any other text is converted to tokens.
    token_files = None if data is None else _find_token_files(Path(data))
    if data is not None and data.startswith(TASK_TEXT_PREFIX):
        text = _tokenize(_SplitText(*make_task_text(data, sequence), is_single_text=False), folder, sequence)
        # Documents of tasks are as long as a window, so every window has to begin with a document.
        text = replace(text, train=replace(text.train, every=sequence))
    elif token_files is None:
        text = _tokenize(_read_source(data), folder, sequence)
    else:
        text = _map_token_files(token_files, sequence)
    # Too short a text would have no separate part for validation.
    title = "Python's own sources" if data is None else f"--data {data}"
    _check_text_length(f"{title}: the part to train on", text.train, sequence)
    _check_text_length(f"{title}: the held-out part", text.held_out, sequence)
    return text


def _check_text_length(title: str, span: TokenSpan, sequence: int) -> None:
    length = max(0, span.stop - span.start)
    required_length = MIN_WINDOWS * sequence + 1
    if length < required_length:
        raise UsageError(
            f"{title} has {length} tokens, and needs {required_length}. Give a longer text, or a shorter --sequence."
        )


def _tokenize(source: _SplitText, folder: Path, sequence: int) -> TrainingTokens:
    text = source.train + source.held_out
    # The file's name is the digest of the text: equal texts share a file, and an edited text gets a new one.
    digest = hashlib.sha256(text).hexdigest()
    train_token_count = len(source.train)
    path = folder / f"{digest[:16]}.tokens"
    tokens = make_byte_tokens(text)
    # after a crash, a file of the right length may have wrong content
    if not path.is_file() or read_file(path) != tokens:
        replace_tokens(path, tokens)
    # A gap of one window separates the windows of the two parts.
    file_name = str(path.resolve())
    held_out_start = train_token_count + (sequence if source.is_single_text else 0)
    held_out_token_span = TokenSpan(file_name, held_out_start, len(text))
    return TrainingTokens(
        TokenSpan(file_name, 0, train_token_count), held_out_token_span, 256, "bytes", f"{source.name}:{digest[:8]}"
    )


def _read_source(data: str | None) -> _SplitText:
    if data is None or not Path(data).is_dir():
        text, name = read_named_text(data, MAX_TEXT_BYTES)
        return _SplitText.split_held_out_text(name, text)
    folder = Path(data)
    if (folder / "state.json").is_file():
        return _SplitText.split_held_out_text(name_user_corpus(data), _read_dataset_text(folder))
    notes = folder / "dataset_dict.json"
    split_names = _read_json(notes).get("splits", []) if notes.is_file() else []
    if "train" not in split_names:
        raise UsageError(
            f"--data {data} is a folder without train.bin, and not a saved dataset with a part 'train'. Give a text "
            "file, a .bin, or what save_to_disk of Hugging Face's datasets wrote."
        )
    text = _read_dataset_text(folder / "train")
    held_out_split = next((split for split in _HELD_OUT_SPLITS if split in split_names), None)
    if held_out_split is None:
        return _SplitText.split_held_out_text(name_user_corpus(data), text)
    return _SplitText(name_user_corpus(data), text, _read_dataset_text(folder / held_out_split), is_single_text=False)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(read_file(path))
    except (OSError, ValueError) as error:
        raise UsageError(f"--data: {path} cannot be read ({error}). Save the dataset again.") from None
    return content if isinstance(content, dict) else {}


def _read_dataset_text(folder: Path) -> bytes:
    """Returns at most the first 128 MiB of a saved dataset: its documents, each followed by a line break."""
    documents = []
    total = 0
    for document in _read_parquet_texts(folder):
        # A lone surrogate has no UTF-8 encoding, so it is replaced.
        documents.append(f"{document}\n".encode(errors="replace"))
        total += len(documents[-1])
        if total >= MAX_TEXT_BYTES:
            break
    return b"".join(documents)[:MAX_TEXT_BYTES]


def _read_parquet_texts(folder: Path) -> Iterator[str]:
    """Yields the text of each row: its column 'text', or its only column of strings."""
    # 1. Import pyarrow, which may not be installed.
    try:
        import pyarrow
    except ImportError:
        raise UsageError(
            f"--data {folder} is a saved dataset, which pyarrow reads: pip install pyarrow, or give a text file."
        ) from None
    # 2. Find the files of the dataset.
    try:
        document_files = [str(entry["filename"]) for entry in _read_json(folder / "state.json")["_data_files"]]
    except (KeyError, TypeError):
        raise UsageError(f"--data: {folder / 'state.json'} names no files. Save the dataset again.") from None
    # 3. Yield the texts of one file after the other. Mapped files are not loaded as a whole.
    for name in document_files:
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
                # A missing text counts as an empty document.
                for rows in stream:
                    yield from (value.as_py() or "" for value in rows.column(column))
        except (OSError, pyarrow.ArrowException) as error:
            raise UsageError(f"--data: {folder / name} cannot be read ({error}). Save the dataset again.") from None


def _find_token_files(data: Path) -> tuple[Path, Path | None] | None:
    """Returns the file of training tokens that `data` names, and the file of held-out tokens or None. `data` is a .bin
    file, or a folder with nanoGPT's train.bin and perhaps val.bin. Otherwise returns None.
    """
    train = data / "train.bin" if (data / "train.bin").is_file() else data
    if train.suffix != ".bin" or train.is_dir():
        return None
    held_out_path = train.with_name("val.bin")
    return train, held_out_path if train.name == "train.bin" and held_out_path.is_file() else None


def _map_token_files(files: tuple[Path, Path | None], sequence: int) -> TrainingTokens:
    """Maps token files in place, and returns their tokens as the text of a training. The highest token in the files
    determines the size of the vocabulary.
    """
    train, val = files
    length, highest_token_id, digest = _read_tokens(train)
    if val is None:
        train_token_count = length - length // _HELD_OUT_PARTS
        held_out_token_span = TokenSpan(str(train.resolve()), train_token_count + sequence, length)
        length = train_token_count
    else:
        # The validation file may have tokens that the training file does not have.
        validation_length, held_out_highest, held_out_digest = _read_tokens(val)
        held_out_token_span = TokenSpan(str(val.resolve()), 0, validation_length)
        highest_token_id = max(highest_token_id, held_out_highest)
        digest = hashlib.sha256((digest + held_out_digest).encode()).hexdigest()
    name = name_user_corpus(str(train.parent if train.name == "train.bin" else train))
    return TrainingTokens(
        TokenSpan(str(train.resolve()), 0, length),
        held_out_token_span,
        highest_token_id + 1,
        "given",
        f"{name}:{digest[:8]}",
    )


def _read_tokens(path: Path) -> tuple[int, int, str]:
    """Returns the number of tokens in a file, the highest token, and the file's digest."""
    import numpy as np

    try:
        if path.suffix != ".bin" or path.stat().st_size % _BYTES_PER_TOKEN:
            raise UsageError(f"--data {path} is not a file of 16-bit tokens. Give a .bin as nanoGPT writes it.")
        with open_file(path, most=_MAX_TOKEN_BYTES) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            length = file.tell() // _BYTES_PER_TOKEN
        highest_token_id = int(np.memmap(path, dtype=np.uint16, mode="r").max()) if length else 0
    except OSError as error:
        raise UsageError(
            f"--data {path} cannot be read ({error.strerror}). Give a .bin as nanoGPT writes it."
        ) from None
    return length, highest_token_id, digest


def resolve_start_and_scales(request: TrainingRequest, store: Path) -> TrainingRequest:
    """Returns the request with the weights and scales that --start and --scales-from name. Raises UsageError."""
    return resolve_scales(resolve_training_start(request, store), store)


def resolve_training_start(request: TrainingRequest, store: Path) -> TrainingRequest:
    """Returns the request with its --start resolved: 'TRAINING' or 'TRAINING:ARM' is replaced by the path of a
    checkpoint. The path of a file gets the digest of the file, so that a resumed training reads the same weights.
    Raises UsageError.
    """
    if not request.settings.start:
        return request
    if (file := find_start_weights_file(request.settings.start)) is not None:
        try:
            with open_file(file, most=MEMORY_BYTES) as content:
                digest = hashlib.file_digest(content, "sha256").hexdigest()
        except OSError as error:
            message = f"--start {file} cannot be read ({error.strerror}). Give a file with a state dict."
            raise UsageError(message) from None
        return replace(request, settings=replace(request.settings, start=f"{file.resolve()}::{digest}"))
    training_name, _, arm_name = request.settings.start.partition(":")
    path = find_training(training_name, store)
    training = load_training_header(path)
    checkpoint = newest_checkpoint(path)
    earlier_training_settings = training.request.settings
    arm = arm_name or training.arms[0].name
    refusal_rules = (
        (
            arm not in [known_arm.name for known_arm in training.arms],
            f"it has no arm {arm!r:.80}, but {', '.join(known_arm.name for known_arm in training.arms)}",
        ),
        (
            bool(earlier_training_settings.make)
            or earlier_training_settings.parallel not in ("", "ddp")
            or earlier_training_settings.master != "fp32",
            (
                "it has no whole fp32 weights of a built-in model, because of its function, its --parallel or its "
                "--master"
            ),
        ),
        (
            (earlier_training_settings.arch, earlier_training_settings.model)
            != (request.settings.arch, request.settings.model),
            f"it trained --arch {earlier_training_settings.arch} --model {earlier_training_settings.model}",
        ),
        (checkpoint is None, f"it has no checkpoint: {training.request.steps} steps, --keep {training.request.keep}"),
    )
    for is_refused, reason in refusal_rules:
        if is_refused:
            raise UsageError(f"--start {training_name}: {reason}. Choose another training or arm.")
    assert checkpoint is not None
    # Ranks that divide only the batch have equal weights, so those of rank 0 are taken.
    folder = checkpoint[0] / "rank-0" if training.request.ranks else checkpoint[0]
    return replace(request, settings=replace(request.settings, start=f"{folder}::{arm}"))


def resolve_scales(request: TrainingRequest, store: Path) -> TrainingRequest:
    """Returns the request with the scales of the training or run that --scales-from names. A training gives the
    scales of its last watched steps. Raises UsageError if no layer could use scales from data.
    """
    settings = request.settings
    is_scale_renewal_swept = any(name in ("refresh-scales", "saturation-bound") for name, _ in request.sweep)
    renews_scales = (
        settings.refresh_scales is not None or settings.saturation_bound is not None or is_scale_renewal_swept
    )
    if settings.scales or (request.scales_from is None and not renews_scales):
        return request
    precisions_used = {*request.dtypes, *dict(settings.precision_map).values()}
    if all(precisions.get(word).tensor_scale is TensorScale.NONE for word in precisions_used):
        names = [name for name in precisions.names() if precisions.get(name).tensor_scale is not TensorScale.NONE]
        raise UsageError(
            "scales from data would have no effect: no layer of these dtypes has one float32 scale for a tensor. Add a "
            f"dtype that has ({', '.join(names)}), or leave the option out."
        )
    if request.scales_from is None:
        return request
    word = request.scales_from
    # 'last' means the newest training, even if a run is newer.
    path = find_training(word, store) if word == "last" else KIND.find(word, store)
    if path is None:
        run = load_stored_run(word, store)
        scales = collect_scales(run)
        scales_origin = f"run {run.id}"
    else:
        stored_training = load_training(path)
        precision_by_arm = {arm.name: arm.precision for arm in stored_training.training.arms}
        # Later readings of a tensor replace earlier ones.
        amaxes = {
            (line.arm, line.seed, line.layer, line.role): line.amax
            for line in stored_training.select_lines(LayerReading)
        }
        magnitudes = (
            (precision_by_arm[arm], layer, role, amax) for (arm, _, layer, role), amax in amaxes.items() if amax > 0
        )
        scales = merge_largest_scales(magnitudes)
        scales_origin = f"training {stored_training.training.id}"
    settings = replace(settings, scales=require_scales(scales, scales_origin))
    layers_with_scales = {layer for _, layer, *_ in scales}
    if settings.make:  # only the worker knows the layers of a user's model, so the worker checks them
        return replace(request, settings=settings)
    for layer in list_layers(settings.arch, make_config(settings, 1)):
        if not layer.high and layer.name not in layers_with_scales:
            raise UsageError(
                f"--scales-from: {scales_origin} has no scale for {layer.name}, a layer of --model {settings.model}."
            )
    return replace(request, settings=settings)
