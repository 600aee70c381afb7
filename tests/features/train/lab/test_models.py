"""The built-in models: their layers, sizes, refusals, and what devices support of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fp8bench.errors import UnknownName, UsageError
from fp8bench.features.train.lab import models
from fp8bench.features.train.request import ARCHITECTURES, TrainerSettings
from fp8bench.model import DeviceFacts, Level
from fp8bench.nn.arithmetics import PlainArithmetic
from fp8bench.nn.sizes import SIZES
from fp8bench.protocols import Arithmetic
from fp8bench.registry import precisions
from tests.counts import for_each
from tests.facts import B200, CPU, H200

PLAIN = PlainArithmetic(torch.float32)


@for_each("arch", ARCHITECTURES)
def test_the_layers_named_are_those_that_ask_for_an_arithmetic(arch: str) -> None:
    """They come in order, each once."""
    asked = []

    def choose(name: str) -> Arithmetic:
        asked.append(name)
        return PLAIN

    settings = TrainerSettings(arch=arch, batch=2, sequence=32)
    models.check_trainer_settings(settings)
    config = replace(models.make_config(settings, 200), width=32, hidden=32)
    models.build_model(settings, config, choose, PLAIN.carrier)
    assert asked == [layer.name for layer in models.list_layers(arch, config)]
    assert [layer.name for layer in models.list_layers(arch, config) if layer.high] == ["head"]


def test_sizes_are_the_models_own_and_those_of_the_text() -> None:
    """A small model takes the text's vocabulary, rounded up; a named one keeps its own unless the text has more."""
    rows = (
        ("nano", 256, 256),
        ("nano", 65, 128),
        ("micro", 1281, 1408),
        ("gpt2-124m", 256, 50304),
        ("gpt2-124m", 60000, 60032),
    )
    for model, vocabulary, own in rows:
        assert models.make_config(TrainerSettings(model=model), vocabulary).vocabulary == own
    usual, given = (models.make_config(TrainerSettings(sequence=length, batch=length), 256) for length in (0, 320))
    assert (usual.batch, usual.sequence) == (SIZES["nano"].batch, SIZES["nano"].sequence)
    built = models.build_model(TrainerSettings(), given, lambda name: PLAIN, PLAIN.carrier)
    assert dict(built.named_parameters())["positions"].shape == (320, 192)


def test_heads_of_gpts_are_tied_where_their_size_is() -> None:
    tied = {
        (arch, model): models.make_config(TrainerSettings(arch=arch, model=model), 256).tied
        for arch in ARCHITECTURES
        for model in ("nano", "gpt2-124m")
    }
    assert {pair for pair, is_tied in tied.items() if is_tied} == {("gpt", "gpt2-124m"), ("moe", "gpt2-124m")}
    models.check_trainer_settings(TrainerSettings(model="nano", rates=(("head", 2.0),)))


@for_each(
    ("settings", "words"),
    [
        ({"model": "nanno"}, "Did you mean 'nano'"),
        ({"arch": "cnn", "sequence": 100}, "multiple of 16"),
        ({"model": "gpt2-124m", "rates": (("head", 2.0),)}, "the head of gpt2-124m is its embedding"),
        ({"arch": "moe", "compile": "yes"}, "--compile yes does not work"),
        ({"arch": "mlp", "checkpointing": "blocks"}, "--checkpointing blocks is for --arch gpt and moe.*mlp"),
        ({"arch": "cnn", "checkpointing": "blocks"}, "--checkpointing blocks is for --arch gpt and moe.*batch"),
        ({"optimizer": "adafactor", "optimizer_states": "bf16"}, "adafactor keeps means of rows and columns"),
        *(({"rates": ((name, 2.0),)}, "unknown parameters of --rates") for name in ("atn", "blocks.7", "blocks.0.att")),
    ],
)
def test_what_cannot_be_trained_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UnknownName if "nanno" in settings.values() else UsageError, match=words):
        models.check_trainer_settings(TrainerSettings(**settings))


TE = replace(H200, packages=(("transformer_engine", "2.13.0"), ("transformer-engine", "2.13.0")))


@for_each(
    ("device", "mode", "settings", "level", "words"),
    [
        # Other architectures are as native as their products; torch has no convolution below 16 bits.
        *((H200, mode, {"arch": arch}, Level.NATIVE, "") for arch in ("gpt", "moe", "mlp") for mode in ("bf16", "fp8")),
        (H200, "bf16", {"arch": "cnn"}, Level.NATIVE, ""),
        (H200, "fp8", {"arch": "cnn"}, Level.EMULATED, ""),
        # Weight gradients are contracted over tokens, those of rotated windows over an image's positions.
        (H200, "fp8", {"batch": 1, "sequence": 100}, Level.REFUSED, "multiples of 16; batch x sequence is 100"),
        (CPU, "fp8", {"batch": 1, "sequence": 100}, Level.EMULATED, ""),
        (B200, "nvfp4", {"arch": "cnn", "sequence": 96}, Level.REFUSED, ""),
        (B200, "nvfp4", {"arch": "cnn", "sequence": 496}, Level.NATIVE, ""),
        # Compiled blocks of 128 must be complete: nano's 192 features do not fit, micro's do.
        (H200, "fp8-block", {"compile": "yes"}, Level.REFUSED, "multiples of 128"),
        (H200, "fp8-block", {"model": "micro", "compile": "yes"}, Level.NATIVE, ""),
        # Scales inside a library cannot be checkpointed; casts without a history can be trained.
        (TE, "fp8-delayed:backend=te", {"model": "gpt2-124m"}, Level.REFUSED, "a checkpoint cannot store"),
        (TE, "fp8:backend=te", {"model": "gpt2-124m"}, Level.NATIVE, ""),
    ],
)
def test_what_a_device_has_for_a_model(
    device: DeviceFacts, mode: str, settings: dict[str, Any], level: Level, words: str
) -> None:
    asked = TrainerSettings(**settings)
    support = models.find_support(asked, models.make_config(asked, 256), precisions.get(mode), device)
    assert support.level is level and words in support.reason, support.reason
