"""Forward and backward of every model that is trained, by the rules of a GPU."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from fp8bench.features.train.lab import models
from fp8bench.features.train.lab.evaluate import TokenWindows
from fp8bench.features.train.request import TrainerSettings
from fp8bench.features.train.values import TokenSpan
from fp8bench.formats.recipes import Recipe
from fp8bench.model import DeviceFacts, Level
from fp8bench.nn import experts
from fp8bench.nn.experts import EXPERTS_PER_TOKEN
from fp8bench.nn.sizes import SIZES
from fp8bench.plan.corpus import Corpus
from fp8bench.protocols import SilentPhases
from fp8bench.registry import precisions
from tests.facts import B200, H200
from tests.rehearsal.stage import Stage

SIZE = replace(SIZES["micro"], layers=1)
MODES = {"H200": ("bf16", "fp8", "fp8-delayed", "fp8-block", "fp8-rowwise"), "B200": ("mxfp8", "nvfp4")}
ALWAYS = {("mlp", "nvfp4"), ("cnn", "bf16"), ("moe", "fp8")}
CASES = [
    pytest.param(arch, gpu, mode, marks=[] if (arch, mode) in ALWAYS else pytest.mark.nightly)
    for arch in ("mlp", "cnn", "moe")  # a GPT is that of the suite transformer
    for gpu, modes in MODES.items()
    for mode in modes
]
GPUS = {"H200": H200, "B200": B200}


@pytest.fixture(autouse=True)
def small_and_even(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives all experts equally many tokens, because tensors without memory choose none.

    A step waits for these numbers.
    """

    def evenly(counts: torch.Tensor) -> list[int]:
        return [SIZE.batch * SIZE.sequence * EXPERTS_PER_TOKEN // len(counts)] * len(counts)

    monkeypatch.setattr(experts, "copy_counts_to_host", evenly)
    monkeypatch.setitem(SIZES, "micro", SIZE)


@pytest.mark.parametrize(("arch", "gpu", "mode"), CASES)
def test_a_pass_is_what_a_gpu_takes(arch: str, gpu: str, mode: str, stage: Stage, corpus: Corpus) -> None:
    facts: DeviceFacts = GPUS[gpu]
    settings, precision = TrainerSettings(model="micro", arch=arch), precisions.get(mode)
    config = models.make_config(settings, 256)
    level = models.find_support(settings, config, precision, facts).level
    if level is Level.REFUSED:
        assert (arch, mode) == ("cnn", "nvfp4"), "its positions are no multiple of 32"
        return
    arithmetic, carrier = precision.arithmetic(facts), precisions.get(precision.carried_by or mode).arithmetic(facts)
    layers = {layer.name: layer for layer in models.list_layers(arch, config)}
    with precision.scope(), torch.device(facts.key):
        model = models.build_model(
            settings, config, lambda name: carrier if layers[name].high else arithmetic.layer(name), arithmetic.carrier
        )
    windows = TokenWindows(TokenSpan(corpus.path, 0, 10_000), config.sequence, facts.key)
    ledger = stage.ledger(facts)
    with precision.scope():
        for step in range(2):  # the first may wait for one-time setup
            with ledger if step else nullcontext():
                model(*windows.draw(0, step, 0, config.batch), SilentPhases()).backward()
    recipe = getattr(precision, "recipe", None)
    if not isinstance(recipe, Recipe) or level is Level.EMULATED:
        assert not ledger.done.products
        return
    one_by_one = [name for name, layer in layers.items() if not layer.high]
    if arithmetic.groups:  # all experts share an up and a down product
        one_by_one = [*{re.sub(r"experts\.\d+", "experts", name) for name in one_by_one}]
        assert (arch == "moe") == (ledger.done.operators["aten::_scaled_grouped_mm"] > 0)
    assert len(ledger.done.products) == len(one_by_one) * (2 if recipe.high_weight_gradient else 3)
