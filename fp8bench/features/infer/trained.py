"""The newest checkpoint of a training as a model that is served, with the text that its training held out."""

from __future__ import annotations

import sys
from array import array
from pathlib import Path

from fp8bench.errors import UsageError
from fp8bench.features.infer.values import ServedModel
from fp8bench.features.train.kind import load_head, newest_checkpoint, training_named
from fp8bench.features.train.lab.models import config_of
from fp8bench.features.train.values import TokenSpan, Training

# Models that are trained under one name and served under another.
_SERVED_AS = {"gpt2-124m": "gpt2"}
_WITH_EXPERTS = "nano-moe"


def trained_model(word: str, store: Path, tokens: int) -> tuple[ServedModel, str]:
    """What 'ID' or 'ID:ARM' means, the reference without an arm, and the size that is timed for it. Raises UsageError
    for what has no cache of keys and values, or no checkpoint."""
    named, _, asked = word.partition(":")
    path = training_named(named, store)
    training = load_head(path)
    arm = asked or training.arms[0].name
    called = f"the training {training.id}"
    own = next((one for one in training.arms if one.name == arm), None)
    if own is None:
        raise UsageError(f"{called} has no arm {arm!r:.80}. It has {', '.join(one.name for one in training.arms)}.")
    settings = own.taken(training.request.settings)
    refusals = (
        (
            settings.arch not in ("gpt", "moe"),
            f"is of --arch {settings.arch}, of which no cache is served: gpt and moe are",
        ),
        (settings.parallel in ("tp", "fsdp"), f"is cut by --parallel {settings.parallel}: a rank has a part of it"),
        (settings.lora > 0, "keeps adapters of --lora alone in its checkpoint"),
        (settings.master != "fp32", f"keeps weights as --master {settings.master}: fp32 ones are read"),
    )
    for wrong, why in refusals:
        if wrong:
            raise UsageError(f"{called} {why}. Choose another training.")
    kept = newest_checkpoint(path)
    if kept is None:
        steps, every = training.request.steps, training.request.keep
        raise UsageError(
            f"{called} has no checkpoint: it was trained {steps} steps, with --keep {every}. Train it again with "
            f"--keep {max(1, steps // 2)}, say."
        )
    folder, place = kept
    words = f"{arm} of training {training.id}, step {place.step} of {training.request.steps}"
    config = config_of(settings, training.text.vocabulary)
    folder = folder / "rank-0" if training.request.ranks else folder
    text = _windows(training, config.sequence, tokens)
    size = _WITH_EXPERTS if config.experts else _SERVED_AS.get(settings.model, settings.model)
    return ServedModel(words, config, str(folder), arm, text), size


def _windows(training: Training, length: int, tokens: int) -> tuple[tuple[int, ...], ...]:
    """Spread over all of the text that was held out."""
    ids = _tokens(training.text.held_out)
    count = min(max(2, tokens // length), (len(ids) - 1) // length)
    starts = [place * ((len(ids) - length - 1) // count) for place in range(count)]
    return tuple(tuple(ids[start : start + length + 1]) for start in starts)


def _tokens(span: TokenSpan) -> array[int]:
    ids = array("H")
    try:
        with Path(span.path).open("rb") as file:
            file.seek(span.start * ids.itemsize)
            ids.frombytes(file.read((span.stop - span.start) * ids.itemsize))
    except (OSError, ValueError) as error:
        raise UsageError(f"the training's text {span.path} cannot be read ({error}). Put it back there.") from None
    if sys.byteorder == "big":
        ids.byteswap()
    return ids
