"""Models that a converter has been through: what it did, left out without a word, or only seems to have done."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8bench import audit_model
from fp8bench.features.audit.values import AuditOutcome, AuditReport
from fp8bench.formats.grids import E4M3
from fp8bench.formats.operators import values
from fp8bench.formats.recipes import TENSOR

IDS = torch.randint(0, 64, (4, 8), generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    """The second layer's sides do not fit, nor the third's; the last one's do."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.narrow = nn.Linear(64, 50)
        self.wide = nn.Linear(50, 64)
        self.last = nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.wide(self.narrow(self.first(x))))


class Model(nn.Module):
    """Two blocks under a tied head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(64, 64)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(64, 64, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Any:
        return self.head(self.blocks(self.embedding(ids)))


class LowLinear(nn.Linear):
    """A fake Transformer Engine layer: emulated FP8, or, depending on `low`, no low precision."""

    low = True

    def __init__(self, inputs: int, outputs: int, bias: bool = True, params_dtype: torch.dtype | None = None) -> None:
        super().__init__(inputs, outputs, bias, dtype=params_dtype)
        self.fp8_meta: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        x, weight = (
            side + (values(side, E4M3, TENSOR) - side).detach() if self.low else side for side in (x, self.weight)
        )
        return nn.functional.linear(x, weight, self.bias)


class WideLinear(LowLinear):
    """As outside of an autocast."""

    low = False


class Mine(nn.Linear):
    """A class whose name reveals nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return LowLinear.forward(self, x)  # type: ignore[arg-type]

    low = True


class Plain(Mine):
    """Casts nothing."""

    low = False


LowLinear.__module__ = WideLinear.__module__ = "transformer_engine.pytorch"


@contextmanager
def transformer_engine(monkeypatch: pytest.MonkeyPatch, linear: type[nn.Module]) -> Iterator[Callable[..., None]]:
    """Accelerate's conversion with a fake of the package that needs CUDA."""
    from accelerate.utils import transformer_engine as own

    package = ModuleType("transformer_engine")
    inner = ModuleType("transformer_engine.pytorch")
    inner.Linear = linear  # type: ignore[attr-defined]
    inner.LayerNorm = nn.LayerNorm
    package.pytorch = inner
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "transformer_engine", package)
        patched.setitem(sys.modules, "transformer_engine.pytorch", inner)
        patched.setattr(own, "is_transformer_engine_available", lambda: True)
        patched.setattr(own, "GatheredParameters", lambda *_, **__: nullcontext())  # requires a launched Accelerator
        yield torch.no_grad()(own.convert_model)


def codes(audit: AuditReport, outcome: AuditOutcome = AuditOutcome.FAIL) -> set[str]:
    return {finding.code for finding in audit.findings if finding.outcome is outcome and finding.code}


def rules(audit: AuditReport) -> dict[str, str]:
    return {layer.name: layer.rule for layer in audit.layers if not layer.low}


def test_an_unconverted_model_fails() -> None:
    audit = audit_model(Model(), IDS)
    assert codes(audit) == {"nothing-converted"} and len(audit.layers) == 9


def test_accelerate_stops_at_an_odd_layer_and_cuts_ties(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    with transformer_engine(monkeypatch, LowLinear) as convert:
        convert(model)
    audit = audit_model(model, IDS)
    assert codes(audit) == {"stopped", "tie-broken"}
    assert {name for name, rule in rules(audit).items() if rule == "stopped"} == {"blocks.0.last", "blocks.1.last"}
    low = {layer.name: layer.runs for layer in audit.layers if layer.low}
    assert low == dict.fromkeys(("blocks.0.first", "blocks.1.first", "head"), "fp8")
    (stopped,) = (finding for finding in audit.findings if finding.code == "stopped")
    assert "blocks.0.narrow" in stopped.why and "2 of 9 layers" in stopped.why


def test_a_class_of_low_precision_that_runs_in_a_wide_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Like Transformer Engine's layers outside autocast."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32)).bfloat16()
    with transformer_engine(monkeypatch, WideLinear) as convert:
        convert(model)
    audit = audit_model(model, torch.randn(8, 64, dtype=torch.bfloat16))
    assert codes(audit) == {"not-cast"} and {layer.runs for layer in audit.layers} == {"not cast"}
    assert audit.low_flops == sum(layer.flops for layer in audit.layers) == 2 * 8 * 64 * 96


def test_a_class_of_anybodys_own_is_known_by_its_numbers() -> None:
    audit = audit_model(nn.Sequential(Mine(64, 64), Plain(64, 64), Mine(64, 32)), torch.randn(8, 64))
    assert [layer.runs for layer in audit.layers] == ["fp8", "", "fp8"]
    assert audit.outcome is AuditOutcome.PASS and rules(audit) == {"1": "filter"}


def test_running_means_stay_as_they_were() -> None:
    model = nn.Sequential(Mine(64, 64), nn.BatchNorm1d(64))
    model.register_buffer("places", torch.zeros(1).expand(64))
    assert audit_model(model, torch.randn(8, 64)).outcome is AuditOutcome.PASS
    assert not model[1].running_mean.any() and model[1].num_batches_tracked == 0  # type: ignore[union-attr, operator]


def test_a_product_that_no_cast_changes_is_checked_on_random_numbers() -> None:
    whole = torch.randint(-3, 4, (64, 64), generator=torch.Generator().manual_seed(0)).float()
    size = (8, 64)
    for kind, batch, weight, expected in (
        (LowLinear, torch.zeros(size), whole, set()),
        (LowLinear, whole[:8], 0 * whole, set()),
        (LowLinear, whole[:0], whole, set()),
        (WideLinear, torch.zeros(size), whole, {"not-cast"}),
        (WideLinear, whole[:8], whole, {"not-cast"}),
    ):
        layer = kind(64, 64, bias=False)
        layer.weight = nn.Parameter(weight)
        assert codes(audit_model(nn.Sequential(layer), batch)) == expected


def test_a_failing_batch_cannot_tell_and_no_batch_is_needed() -> None:
    audit = audit_model(nn.Sequential(LowLinear(64, 64)), torch.randn(4, 48))
    assert audit.outcome is AuditOutcome.CANNOT_TELL and codes(audit, AuditOutcome.CANNOT_TELL) == {"raises"}
    audit = audit_model(nn.Sequential(LowLinear(64, 64)))
    assert audit.outcome is AuditOutcome.PASS and [layer.runs for layer in audit.layers] == ["fp8"]


def _fits(module: nn.Module, _: str) -> bool:
    return isinstance(module, nn.Linear) and module.in_features % 16 == 0 and module.out_features % 16 == 0


def convert(model: nn.Module, **options: Any) -> nn.Module:
    from torchao.float8 import convert_to_float8_training
    from torchao.float8.config import Float8LinearConfig

    return convert_to_float8_training(model, config=Float8LinearConfig(emulate=True), **options)


@pytest.mark.slow
def test_models_converted_by_torchao_are_recognised() -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = convert(Model(), module_filter_fn=_fits)
    before = {name: module._forward_hooks.copy() for name, module in model.named_modules()}
    audit = audit_model(model, IDS, "fp8")
    assert audit.outcome is AuditOutcome.PASS and codes(audit, AuditOutcome.PASS) == {"shape"}
    assert {layer.runs for layer in audit.layers if layer.low} == {"fp8"}
    assert audit.layers[0].what == "torchao Float8Linear"
    assert {name: module._forward_hooks for name, module in model.named_modules()} == before
    assert codes(audit_model(model, IDS, "mxfp8")) == {"other-precision"}
    twice = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
    twice.append(twice[0])
    assert codes(audit_model(convert(twice), torch.randn(4, 64))) == {"shared"}
    weights = nn.Sequential(nn.Linear(64, 64))
    quantize_(weights, Int8WeightOnlyConfig())
    audit = audit_model(weights, torch.randn(4, 64))
    assert audit.outcome is AuditOutcome.PASS and audit.layers[0].runs == "weights alone"


@pytest.mark.slow
def test_accelerates_way_to_torchao_leaves_the_ends() -> None:
    from accelerate.utils.ao import convert_model_to_fp8_ao
    from torchao.float8.config import Float8LinearConfig

    model = Model()
    convert_model_to_fp8_ao(model, config=Float8LinearConfig(emulate=True))
    audit = audit_model(model, IDS)
    left = rules(audit)
    assert audit.outcome is AuditOutcome.PASS
    assert (left["blocks.0.first"], left["head"], left["blocks.0.wide"]) == ("filter", "filter", "shape")
