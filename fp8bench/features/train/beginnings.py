"""What a training begins with that lies elsewhere: a checkpoint, a state dict, stored scales. Requests get what these
words mean, so that a resumed training begins with the same."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

from fp8bench.errors import UsageError
from fp8bench.features.train.kind import find_training, load_head, load_training, newest_checkpoint, training_named
from fp8bench.features.train.lab.models import config_of, layers_of
from fp8bench.features.train.request import TrainingRequest
from fp8bench.features.train.values import LayerReading
from fp8bench.protocols import TensorScale
from fp8bench.registry import precisions
from fp8bench.store.runs.listing import largest_scales, load_named, refuse_no_scales, scales_of


def started_from(request: TrainingRequest, store: Path) -> TrainingRequest:
    """With the checkpoint that 'TRAINING' or 'TRAINING:ARM' means in the place of these words. Raises UsageError."""
    word, _, asked = request.settings.start.partition(":")
    if not word:
        return request
    path = training_named(word, store)
    training, kept = load_head(path), newest_checkpoint(path)
    own, arm = training.request.settings, asked or training.arms[0].name
    lora = any(one.taken(own).lora for one in training.arms if one.name == arm)
    refusals = (
        (lora, "its checkpoint has adapters of --lora alone"),
        (arm not in [one.name for one in training.arms],
         f"it has no arm {arm!r:.80}, but {', '.join(one.name for one in training.arms)}"),
        (bool(own.make) or own.parallel not in ("", "ddp") or own.master != "fp32",
         "whole fp32 weights of a built-in model are needed: no --make, no --parallel but ddp, and no other --master"),
        ((own.arch, own.model) != (request.settings.arch, request.settings.model),
         f"it trained --arch {own.arch} --model {own.model}"),
        (kept is None, f"it has no checkpoint: {training.request.steps} steps, --keep {training.request.keep}"),
    )  # fmt: skip
    for wrong, why in refusals:
        if wrong:
            raise UsageError(f"--start {word}: {why}. Choose another training or arm.")
    assert kept is not None
    folder = kept[0] / "rank-0" if training.request.ranks else kept[0]
    return replace(request, settings=replace(request.settings, start=f"{folder}::{arm}"))


def with_scales(request: TrainingRequest, store: Path) -> TrainingRequest:
    """The request with the scales of the training or run that it names; a training's are of its last watched steps."""
    if request.scales_from is None or request.settings.scales:
        return request
    words = {*request.dtypes, *dict(request.settings.precision_map).values()}
    if all(precisions.get(word).tensor_scale is TensorScale.NONE for word in words):
        having = [name for name in precisions.names() if precisions.get(name).tensor_scale is not TensorScale.NONE]
        raise UsageError(
            "--scales-from would change nothing: no layer of these dtypes has one float32 scale a tensor. Add a dtype "
            f"that has ({', '.join(having)}), or leave it out."
        )
    last, word = request.scales_from == "last", request.scales_from
    path = training_named(word, store) if last else find_training(word, store)
    if path is None:
        run = load_named(word, store)
        known, of = scales_of(run), f"run {run.id}"
    else:
        kept = load_training(path)
        modes = {arm.name: arm.precision for arm in kept.training.arms}
        amaxes = {(line.arm, line.seed, line.layer, line.role): line.amax for line in kept.of(LayerReading)}
        above_0 = ((modes[arm], layer, role, amax) for (arm, _, layer, role), amax in amaxes.items() if amax > 0)
        known = largest_scales(above_0)
        of = f"training {kept.training.id}"
    settings = replace(request.settings, scales=refuse_no_scales(known, of))
    named = {layer for _, layer, *_ in known}
    if settings.make:  # its layers are known to its worker alone, which says so
        return replace(request, settings=settings)
    for layer in layers_of(settings.arch, config_of(settings, 1)):
        if not layer.high and layer.name not in named:
            raise UsageError(
                f"--scales-from: {of} has no scale of {layer.name}, which --model {settings.model} multiplies by. "
                "Choose one of the same model."
            )
    return replace(request, settings=settings)


def with_file(request: TrainingRequest) -> TrainingRequest:
    """With the digest of the state dict that it begins with behind its place: a resumed training reads the same."""
    if not request.settings.weights_from:
        return request
    path = Path(request.settings.weights_from).resolve()
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UsageError(f"--from {path} cannot be read ({error.strerror}). Give a file with a state dict.") from None
    return replace(request, settings=replace(request.settings, weights_from=f"{path}::{digest}"))
