"""The table of models: what they are made of, what is refused, and that its layers are those that are made."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fp8bench.errors import UnknownName, UsageError
from fp8bench.features.train.lab import models
from fp8bench.features.train.request import ARCHITECTURES, TrainerSettings
from fp8bench.model import Level
from fp8bench.nn.arithmetics import PlainArithmetic
from fp8bench.nn.sizes import SIZES
from fp8bench.protocols import Arithmetic, SilentPhases
from fp8bench.registry import precisions
from tests.counts import for_each
from tests.facts import B200, CPU, H200


@for_each("arch", ARCHITECTURES)
def test_the_layers_named_are_those_that_ask_for_an_arithmetic(arch: str) -> None:
    """In that order, each once; and the model learns something from one batch."""
    plain = PlainArithmetic(torch.float32)
    asked = []

    def choose(name: str) -> Arithmetic:
        asked.append(name)
        return plain

    settings = TrainerSettings(arch=arch, batch=2, sequence=32)
    config = replace(models.config_of(settings, 200), width=32, hidden=32)
    torch.manual_seed(0)
    model = models.built(settings, config, choose, plain.carrier)
    assert asked == [layer.name for layer in models.layers_of(arch, config)]
    assert [layer.name for layer in models.layers_of(arch, config) if layer.high] == ["head"]
    tokens = torch.randint(200, (2, 33))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(15):
        loss = model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), SilentPhases())
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0] - 1


def test_a_small_model_takes_the_vocabulary_of_the_text() -> None:
    """In whole blocks of a product's sides; a named one keeps its own, unless the text has more."""
    assert models.config_of(TrainerSettings(model="nano"), 256).vocabulary == 256
    assert models.config_of(TrainerSettings(model="micro"), 1280 + 1).vocabulary == 1408
    assert models.config_of(TrainerSettings(model="nano"), 65).vocabulary == 128
    assert models.config_of(TrainerSettings(model="gpt2-124m"), 256).vocabulary == 50304
    assert models.config_of(TrainerSettings(model="gpt2-124m"), 60000).vocabulary == 60032


def test_batch_and_sequence_are_the_models_own_unless_given() -> None:
    own, given = (models.config_of(TrainerSettings(sequence=length, batch=length), 256) for length in (0, 320))
    assert (own.batch, own.sequence) == (SIZES["nano"].batch, SIZES["nano"].sequence)
    plain = PlainArithmetic(torch.float32)
    model = models.built(TrainerSettings(), given, lambda name: plain, plain.carrier)
    assert dict(model.named_parameters())["positions"].shape == (320, 192)


def test_what_cannot_be_trained_is_refused() -> None:
    with pytest.raises(UnknownName, match="Did you mean 'nano'"):
        models.check(TrainerSettings(model="nanno"))
    with pytest.raises(UsageError, match=r"sequence of 100 does not divide.*multiple of 16"):
        models.check(TrainerSettings(arch="cnn", sequence=100))
    with pytest.raises(UsageError, match="--compile yes cannot be had of --arch moe"):
        models.check(TrainerSettings(arch="moe", compile="yes"))
    for arch in ("mlp", "cnn"):
        with pytest.raises(
            UsageError, match=f"--checkpointing blocks is for --arch gpt and moe.*{'batch' if arch == 'cnn' else 'mlp'}"
        ):
            models.check(TrainerSettings(arch=arch, checkpointing="blocks"))
    for arch in ARCHITECTURES:
        models.check(TrainerSettings(arch=arch))


def test_scales_that_nobody_could_keep_are_refused() -> None:
    """Transformer Engine's own delayed scales; what depends on no cast before may be trained."""
    facts = replace(H200, packages=(("transformer_engine", "2.13.0"), ("transformer-engine", "2.13.0")))
    settings = TrainerSettings(model="gpt2-124m")
    config = models.config_of(settings, 256)
    delayed, current = (
        models.support(settings, config, precisions.get(f"{mode}:backend=te"), facts) for mode in ("fp8-delayed", "fp8")
    )
    assert delayed.level is Level.REFUSED and "no checkpoint can hold" in delayed.reason
    assert "no checkpoint can hold" not in current.reason


def test_a_convolution_in_low_precision_is_emulated_on_every_device() -> None:
    """torch convolves nothing narrower than 16 bits; other architectures are as native as their products."""
    levels = {}
    for arch in ARCHITECTURES:
        settings = TrainerSettings(arch=arch)
        config = models.config_of(settings, 256)
        levels[arch] = {
            mode: models.support(settings, config, precisions.get(mode), H200).level for mode in ("bf16", "fp8")
        }
    assert levels["gpt"] == levels["moe"] == levels["mlp"] == {"bf16": Level.NATIVE, "fp8": Level.NATIVE}
    assert levels["cnn"] == {"bf16": Level.NATIVE, "fp8": Level.EMULATED}
    settings = TrainerSettings(batch=1, sequence=100)
    config = models.config_of(settings, 256)
    found = models.support(settings, config, precisions.get("fp8"), H200)
    assert found.level is Level.REFUSED and "multiples of 16; batch x sequence is 100" in found.reason
    assert models.support(settings, config, precisions.get("fp8"), CPU).level is Level.EMULATED


def test_compiled_blocks_of_128_need_whole_ones() -> None:
    """nano's 192 features fill none, micro's all do."""
    found = {}
    for size in ("nano", "micro"):
        settings = TrainerSettings(model=size, compile="yes")
        config = models.config_of(settings, 256)
        found[size] = models.support(settings, config, precisions.get("fp8-block"), H200)
    assert found["micro"].level is Level.NATIVE
    assert found["nano"].level is Level.REFUSED and "multiples of 128" in found["nano"].reason


def test_a_convolution_of_rotated_operands_needs_positions_in_multiples() -> None:
    """Products of written-out windows contract over an image's positions, zeros included."""
    for sequence, level in ((96, Level.REFUSED), (496, Level.NATIVE)):
        settings = TrainerSettings(arch="cnn", sequence=sequence)
        found = models.support(settings, models.config_of(settings, 256), precisions.get("nvfp4"), B200)
        assert found.level is level, found.reason
