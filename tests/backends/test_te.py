"""Transformer Engine as a backend: by facts, and by a stand-in package that computes here."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8bench.errors import BackendMissing
from fp8bench.model import Case, DeviceFacts, Level, Request
from fp8bench.nn.exercise import make_exercise
from fp8bench.nn.parts import FeedForward, NormedFeedForward
from fp8bench.numerics.norms import relative_frobenius
from fp8bench.plan.corpus import Corpus
from fp8bench.plan.make import make_plan
from fp8bench.protocols import Arithmetic, Role, Setup, SilentPhases
from fp8bench.registry import backends, precisions, workloads
from fp8bench.worker.trial import ProductTrials
from tests.backends import fake_te, te_names
from tests.counts import for_each
from tests.facts import A100, B200, CPU, H200, MI300X, gpu
from tests.formats.scaling_definitions import gaussian
from tests.nn.layers import linear, outcome

VERSION = "2.20.2"
MODES = ("fp8", "fp8-delayed:history=4", "fp8-block", "mxfp8", "nvfp4:stochastic=off:hadamard=off")


def here(facts: DeviceFacts) -> DeviceFacts:
    return replace(facts, packages=(("transformer_engine", VERSION),))


@pytest.fixture
def te(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake package and a B200 whose tensors are on the CPU."""
    fake_te.install(monkeypatch)
    monkeypatch.setattr(DeviceFacts, "key", property(lambda facts: "cpu"))


@for_each(
    ("word", "facts", "level", "words"),
    [
        ("fp8", H200, Level.NATIVE, "Transformer Engine's Float8CurrentScaling"),
        ("fp8:formats=e4m3:scale=pow2", H200, Level.NATIVE, "Float8CurrentScaling"),
        ("fp8-delayed:history=16:margin=1", H200, Level.NATIVE, "DelayedScaling"),
        ("fp8-block", H200, Level.NATIVE, "Float8BlockScaling"),
        ("mxfp8", B200, Level.NATIVE, "MXFP8BlockScaling"),
        ("nvfp4", B200, Level.NATIVE, "NVFP4BlockScaling"),
        ("mxfp6", B200, Level.REFUSED, "te has no recipe mxfp6, only fp8, fp8-e4m3"),
        ("fp8-rowwise", H200, Level.REFUSED, "te has no recipe fp8-rowwise"),
        ("fp8:gw=bf16", H200, Level.REFUSED, "the nearest is fp8"),
        ("fp8-delayed:interval=2", H200, Level.REFUSED, "the nearest is fp8-delayed"),
        ("mxfp8:scale=floor", B200, Level.REFUSED, "the nearest is mxfp8"),
        ("fp8", A100, Level.REFUSED, "its FP8 begins at compute capability 8.9"),
        ("fp8-block", gpu("L40S", (8, 9)), Level.REFUSED, "its blocks of 128 begin at compute capability 9.0"),
        ("mxfp8", gpu("RTX 5090", (12, 0)), Level.REFUSED, "it refuses MXFP8 from compute capability 12.0 on"),
        ("fp8", CPU, Level.REFUSED, "runs on NVIDIA's GPUs"),
        ("fp8", MI300X, Level.REFUSED, "runs on NVIDIA's GPUs"),
    ],
)
def test_its_recipes_depend_on_the_device(word: str, facts: DeviceFacts, level: Level, words: str) -> None:
    result = precisions.get(f"{word}:backend=te").support(here(facts))
    assert result.level is level and words in result.reason


def test_a_missing_package_gives_the_command_that_installs_it() -> None:
    assert "pip install 'transformer-engine[pytorch]'" in precisions.get("fp8:backend=te").support(H200).reason


@for_each(("axis", "value"), [("compile", "yes"), ("checkpointing", "blocks")])
def test_options_that_its_layers_lack_are_refused(axis: str, value: str) -> None:
    request = Request("transformer", ("bf16", "fp8"), backend="te", axes=((axis, (value,)),))
    (group,) = make_plan(request, (here(H200),), "x")
    refused = next(case.support for case in group.cases if case.case.precision == "fp8:backend=te")
    assert refused.level is Level.REFUSED and f"choose {axis}=no" in refused.reason


@pytest.mark.usefixtures("te")
@pytest.mark.parametrize("mode", MODES)
def test_its_layer_gets_our_weight_and_gives_gradients(mode: str) -> None:
    result = []
    for word in (f"{mode}:backend=te", f"{mode}:backend=emulated"):
        layer = linear(precisions.get(word).arithmetic(here(B200)).layer("one"), 64, 48)
        assert [name for name, _ in layer.named_parameters()] == ["weight"] and layer.weight.dtype == torch.float32
        result.append(outcome(layer, gaussian(32, 64), gaussian(32, 48, seed=4)))
    for theirs, ours in zip(*result, strict=True):
        assert theirs.dtype == ours.dtype and relative_frobenius(theirs.double(), ours.double()) < 1e-6


@pytest.mark.usefixtures("te")
def test_scales_are_renewed_once_a_pass_and_read_out() -> None:
    """One autocast per layer would count each pass once per layer."""
    arithmetic = precisions.get("fp8-delayed:history=4:backend=te").arithmetic(here(B200))
    case = Case("mlp", (), "fp8-delayed", "cpu")
    setup = Setup(case, CPU, 0, arithmetic, arithmetic, {})
    build = partial(FeedForward, 32, 64, False, 1.0, arithmetic.layer)
    state = make_exercise(setup, build, [(16, 32)], torch.bfloat16, True)
    before = fake_te.Autocast.left
    state.step(SilentPhases())
    assert fake_te.Autocast.left == before + 1 and not fake_te.Autocast.open
    scales = arithmetic.layer_scales()
    assert [item.layer for item in scales] == ["up"] * 3 + ["down"] * 3
    assert [item.role for item in scales] == ["input", "weight", "gradient"] * 2
    assert scales[0].amax == float(state.inputs[0].detach().abs().max()) and scales[0].scale == 2.0


@pytest.mark.usefixtures("te")
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_its_fused_layers_are_the_operations_one_after_the_other(
    whole: bool, gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []
    for kind in (fake_te.LayerNormLinear, fake_te.LayerNormMLP):
        monkeypatch.setattr(kind, "forward", _told(kind, called))
    outcomes = []
    for word in ("fp8:backend=te", "fp8:backend=emulated"):
        arithmetic = precisions.get(word).arithmetic(here(B200))
        setup = Setup(Case("mlp", (), "fp8", "cpu"), CPU, 0, arithmetic, arithmetic, {})
        build = partial(NormedFeedForward, 32, 64, gated, arithmetic.layer, whole)
        state = make_exercise(setup, build, [(16, 32)], torch.bfloat16, True)
        assert len(list(state.layer.parameters())) == 3
        outcomes.append(state.outcome())
    assert set(called) == {"LayerNormMLP" if whole else "LayerNormLinear"}
    for result, expected in zip(*((y, *gradients) for y, gradients in outcomes), strict=True):
        assert relative_frobenius(result.double(), expected.double()) < 1e-2


def transformer(arithmetic: Arithmetic, corpus: Corpus, *params: tuple[str, Any]) -> Setup:
    case = Case("transformer", (("size", "nano"), ("batch", 1), ("sequence", 32), *params), "fp8", "cpu")
    return Setup(case, CPU, 0, arithmetic, precisions.get("bf16").arithmetic(CPU), {}, corpus=corpus.path)


@pytest.mark.usefixtures("te")
def test_its_block_computes_what_ours_does_and_marks_no_phase(corpus: Corpus) -> None:
    outcomes = []
    for word in ("fp8:backend=te", "fp8:backend=emulated"):
        arithmetic = precisions.get(word).arithmetic(here(B200))
        setup = transformer(arithmetic, corpus, ("micro_batches", 1), ("cut", "block"))
        workload = workloads.get("transformer")
        state = workload.prepare(setup)
        assert state.compiled is (word == "fp8:backend=te")
        outcomes.append(workload._compute_first_gradients(setup))
    (loss, gradients), (wanted_loss, expected) = outcomes
    assert abs(loss - wanted_loss) < 1e-2 and len(gradients) == len(expected)
    for result, exact in zip(gradients, expected, strict=True):
        assert result.shape == exact.shape and relative_frobenius(result.double(), exact.double()) < 5e-2


@pytest.mark.usefixtures("te")
@pytest.mark.parametrize("cut", ["linear", "block"])
def test_weights_are_cast_in_a_step_s_first_pass(cut: str, corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[bool | None] = []
    forward = fake_te.Linear.forward

    def told(self: fake_te.Linear, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        called.append(is_first_microbatch)
        return forward(self, inp, is_first_microbatch)

    monkeypatch.setattr(fake_te.Linear, "forward", told)
    arithmetic = precisions.get("fp8:backend=te").arithmetic(here(B200))
    result = {}
    for weights in ("cached", "recast"):
        setup = transformer(arithmetic, corpus, ("micro_batches", 2), ("cut", cut), ("weights", weights))
        state = workloads.get("transformer").prepare(setup)
        called.clear()
        state.step(SilentPhases())
        state.step(SilentPhases())
        layers, (first, later) = len(called) // 4, (True, False) if weights == "cached" else (None, None)
        assert called == 2 * [*layers * [first], *layers * [later]]
        result[weights] = [parameter.detach().clone() for parameter in state.parameters]
        called.clear()
        state.forward(*state.loader.next(), SilentPhases())
        assert set(called) == {None}
    assert all(torch.equal(*pair) for pair in zip(*result.values(), strict=True))


def test_every_layer_accepts_the_argument_for_the_first_pass() -> None:
    lines = te_names.TABLE.read_text().splitlines()
    names = ("Linear", "LayerNormLinear", "LayerNormMLP", "TransformerLayer")
    assert all(f"first micro-batch {name}" in lines for name in names)
    params = {"size": "gpt2-124m", "batch": 2, "sequence": 64, "micro_batches": 2, "weights": "cached"}
    support = workloads.get("transformer").support(params, precisions.get("fp8:backend=te"), here(H200))
    assert support.level is Level.NATIVE and "micro-batch" not in support.reason


def _told(kind: type[fake_te.LayerNormLinear], called: list[str]) -> Callable[..., torch.Tensor]:
    forward = kind.forward

    def told(self: fake_te.LayerNormLinear, inp: torch.Tensor, is_first_microbatch: bool | None) -> torch.Tensor:
        called.append(kind.__name__)
        return forward(self, inp, is_first_microbatch)

    return told


@pytest.mark.usefixtures("te")
@pytest.mark.parametrize("mode", MODES)
def test_its_products_are_tried_before_they_are_timed(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("mlp", (), f"{mode}:backend=te", "cuda:0")
    assert ProductTrials().find_error(case, here(B200)) == ""
    whole = fake_te.Linear.forward

    def wrong(self: fake_te.Linear, inp: torch.Tensor, is_first_microbatch: bool | None) -> torch.Tensor:
        return whole(self, torch.cat((inp[:, :-256], torch.zeros_like(inp[:, -256:])), 1))

    monkeypatch.setattr(fake_te.Linear, "forward", wrong)
    assert "its forward product is wrong" in ProductTrials().find_error(case, here(B200))


@for_each("error", [ImportError, RuntimeError, OSError])
def test_a_package_that_does_not_import_gives_its_error(
    error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "transformer_engine").mkdir()
    words = f"raise {error.__name__}('Found empty transformer-engine meta package')"
    (tmp_path / "transformer_engine" / "__init__.py").write_text(words)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(BackendMissing, match=r"te is installed and cannot be imported .*: Found empty"):
        backends.get("te").imported()
    monkeypatch.setattr(DeviceFacts, "key", property(lambda facts: "cpu"))
    assert "Found empty" in ProductTrials().find_error(Case("mlp", (), "fp8:backend=te", "cuda:0"), here(H200))


@pytest.mark.slow
def test_the_table_equals_the_released_sources(tmp_path: Path) -> None:
    options = ("-q", "--no-deps", "-d", str(tmp_path))
    command = [sys.executable, "-m", "pip", "download", *options, f"transformer_engine=={VERSION}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except subprocess.TimeoutExpired as slow:
        pytest.skip(f"transformer_engine {VERSION} cannot be downloaded here: {slow}")
    wheels = list(tmp_path.glob("*.whl"))
    if done.returncode or not wheels:
        pytest.skip(f"transformer_engine {VERSION} cannot be downloaded here: {done.stderr.strip()[-200:]}")
    assert te_names.derived(wheels[0]) == te_names.TABLE.read_text()


@for_each("mode", ["fp8", "fp8-block", "mxfp8"])
def test_its_casts_and_products_are_those_of_single_products(te: None, mode: str) -> None:
    ours = precisions.get(mode).arithmetic(CPU)
    theirs = precisions.get(f"{mode}:backend=te").arithmetic(here(B200)).separate()
    a, b = gaussian(64, 128).bfloat16(), gaussian(96, 128, seed=5).bfloat16()
    for first, second in ((Role.INPUT, Role.WEIGHT), (Role.GRADIENT, Role.WEIGHT), (Role.GRADIENT, Role.INPUT)):
        results = [
            arithmetic.product(arithmetic.cast(a, first), arithmetic.cast(b, second), torch.bfloat16)
            for arithmetic in (ours, theirs)
        ]
        assert results[0].shape == (64, 96) and torch.equal(*results)
        restored = [one.restore(one.cast(a, first), torch.float32) for one in (ours, theirs)]
        assert torch.equal(*restored)


@for_each(
    ("mode", "operands", "reason"),
    [
        ("fp8", "cast", ""),
        ("fp8", "ready", "a library's operands are cast in every step"),
        ("fp8-delayed", "cast", "Transformer Engine casts for fp8-delayed only within its layers"),
        ("nvfp4", "cast", "choose suite transformer, or fp8, fp8-e4m3, fp8-block, mxfp8 here"),
    ],
)
def test_suite_gemm_has_arms_of_its_products(mode: str, operands: str, reason: str) -> None:
    request = Request("gemm", ("bf16", f"{mode}:backend=te"), axes=(("shape", ("512",)), ("operands", (operands,))))
    (group,) = make_plan(request, [here(B200)]).groups
    support = next(case.support for case in group.cases if "te" in case.case.mode)
    assert (support.level is Level.REFUSED) is bool(reason) and reason in support.reason
