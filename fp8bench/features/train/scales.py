"""Scales that a training or a run has kept, for a training that takes them as they are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fp8bench.errors import UsageError
from fp8bench.features.train.kind import find_training, load_training, training_named
from fp8bench.features.train.lab.models import config_of, layers_of
from fp8bench.features.train.request import TrainingRequest
from fp8bench.features.train.values import LayerReading
from fp8bench.store.runs.listing import load_named
from fp8bench.store.stored_scales import largest, refuse_none, scales_of


def with_scales(request: TrainingRequest, store: Path) -> TrainingRequest:
    """The request with the scales of the training or run that it names; a training's are of its last watched steps."""
    if request.scales_from is None or request.settings.make or request.settings.scales:
        return request
    last, word = request.scales_from == "last", request.scales_from
    path = training_named(word, store) if last else find_training(word, store)
    if path is None:
        run = load_named(word, store)
        known, of = scales_of(run), f"run {run.id}"
    else:
        kept = load_training(path)
        modes = {arm.name: arm.precision for arm in kept.training.arms}
        amaxes = {(line.arm, line.seed, line.layer, line.role): line.amax for line in kept.of(LayerReading)}
        known = largest((modes[arm], layer, role, amax) for (arm, _, layer, role), amax in amaxes.items() if amax > 0)
        of = f"training {kept.training.id}"
    settings = replace(request.settings, scales=refuse_none(known, of))
    named = {layer for _, layer, *_ in known}
    for layer in layers_of(settings.arch, config_of(settings, 1)):
        if not layer.high and layer.name not in named:
            raise UsageError(
                f"--scales-from: {of} has no scale of {layer.name}, which --model {settings.model} multiplies by. "
                "Choose one of the same model."
            )
    return replace(request, settings=settings)
