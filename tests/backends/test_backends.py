"""Backends: what each takes and refuses, by facts, and how one is requested."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from fp8bench.errors import UnknownName, UsageError
from fp8bench.model import Case, DeviceFacts, Level, Request, Support
from fp8bench.nn.shared_precisions import RecipePrecision
from fp8bench.numerics.norms import relative_frobenius
from fp8bench.plan.make import check_request, make_plan
from fp8bench.protocols import Role
from fp8bench.registry import backends, precisions
from fp8bench.worker.trial import find_wrong_product
from tests.counts import for_each
from tests.facts import A100, B200, CPU, H200, MI300X, V100, gpu
from tests.formats.scaling_definitions import gaussian
from tests.plans import cases_of

DEVICES = [
    CPU,
    V100,
    A100,
    H200,
    B200,
    MI300X,
    gpu("unknown", None),
    DeviceFacts("xpu", 0, "something else", 1 << 30, "2.13.0"),
]
RECIPES = [name for name in precisions.names() if isinstance(precisions.get(name), RecipePrecision)]


def here(facts: DeviceFacts, **versions: str) -> DeviceFacts:
    return replace(facts, packages=tuple(versions.items()))


def support(word: str, facts: DeviceFacts, **versions: str) -> Support:
    return precisions.get(word).support(here(facts, **versions))


@for_each("name", backends.names())
def test_a_backend_introduces_itself(name: str) -> None:
    backend = backends.get(name)
    assert backend.name == name == name.lower() and not set(name) & set(" ,:={}/@'")
    assert backend.summary and "\n" not in backend.summary and backend.package


@for_each("facts", DEVICES)
@for_each("name", backends.names())
def test_each_recipe_has_a_support_level_and_a_reason(name: str, facts: DeviceFacts) -> None:
    backend = backends.get(name)
    everything = here(facts, **{backend.package: "99.0"}) if backend.package != "torch" else facts
    for mode in RECIPES:
        for item in (facts, everything):
            result = precisions.get(mode).by(backend).support(item)
            assert isinstance(result.level, Level) and result.reason and "\n" not in result.reason
            own = precisions.get(mode).support(item)
            assert result.level is not Level.NATIVE or own.level is Level.NATIVE or name == "te"


@for_each(
    ("word", "facts", "level", "words"),
    [
        ("fp8:backend=torch", H200, Level.NATIVE, "a scale a tensor"),
        ("fp8:backend=torch", CPU, Level.REFUSED, "torch has no such product here (no hardware for FP8"),
        ("mxfp8:backend=torch", H200, Level.REFUSED, "choose backend=emulated, or auto"),
        ("fp8:backend=emulated", H200, Level.EMULATED, "backend=emulated"),
        ("fp8:backend=torchao", H200, Level.NATIVE, "torchao's recipe tensorwise"),
        ("fp8-rowwise:backend=torchao", H200, Level.NATIVE, "recipe rowwise,"),
        ("fp8-rowwise:gw=bf16:backend=torchao", H200, Level.NATIVE, "rowwise_with_gw_hp"),
        ("fp8:backend=torchao", CPU, Level.EMULATED, "torchao's own emulation of its recipe tensorwise: no hardware"),
        ("mxfp6:backend=torchao", H200, Level.REFUSED, "torchao has no recipe mxfp6"),
        ("fp8:scale=pow2:backend=torchao", H200, Level.REFUSED, "the nearest is fp8"),
    ],
)
def test_a_backend_takes_its_recipes_and_names_why_it_refuses_others(
    word: str, facts: DeviceFacts, level: Level, words: str
) -> None:
    result = support(word, facts, torchao="0.18.0")
    assert result.level is level and words in result.reason


def test_a_missing_or_old_version_is_named() -> None:
    missing = support("fp8:backend=torchao", H200)
    assert missing.level is Level.REFUSED and "torchao is not installed here: pip install 'torchao'" in missing.reason
    result = support("fp8:backend=torchao", CPU, torchao="0.9.1")
    assert result.reason == "torchao 0.9.1 is too old: 0.13 or later is needed"
    assert backends.get("torchao").missing("0.18.0+cu130") == "" == backends.get("torchao").missing("1.0rc1")


def test_a_mode_has_one_backend_and_auto_selects_none() -> None:
    assert precisions.find_canonical_name("fp8-delayed:backend=torch:margin=1") == "fp8-delayed:margin=1:backend=torch"
    assert precisions.find_canonical_name("fp8:backend=auto") == "fp8"
    with pytest.raises(UnknownName, match="Did you mean 'torchao'"):
        precisions.get("fp8:backend=torchoa")
    with pytest.raises(UsageError, match="gives backend twice"):
        precisions.get("fp8:backend=torch:backend=emulated")
    with pytest.raises(UsageError, match=r"bf16 is torch's own.*Leave backend=torch out"):
        precisions.get("bf16:backend=torch")


def cases(request: Request, facts: DeviceFacts) -> dict[str, tuple[Case, Support]]:
    plan = make_plan(request, (facts,))
    return {planned.case.mode: (planned.case, planned.support) for planned in cases_of(plan)}


def test_a_request_s_backend_is_for_dtypes_that_name_none() -> None:
    request = Request(
        "mlp",
        ("bf16", "fp8", "fp8:backend=torch"),
        axes=(("gated", ("no",)),),
        backend="emulated",
        precision_map=(("down", "fp8-rowwise"),),
    )
    result = cases(request, H200)
    inside = "{down=fp8-rowwise:backend=emulated}"
    assert {f"fp8:backend=emulated{inside}", f"fp8:backend=torch{inside}", "bf16"} <= set(result)
    assert result["bf16"][1].backend == "torch 2.13.0"
    _, emulated = cases(replace(request, precision_map=()), H200)["fp8:backend=emulated"]
    assert emulated.level is Level.EMULATED and emulated.backend == "emulated (torch 2.13.0)"


def test_auto_keeps_names_and_reports_the_backend() -> None:
    for facts, mode, backend in (
        (H200, "fp8", "torch 2.13.0"),
        (CPU, "fp8", "emulated (torch 2.13.0)"),
        (CPU, "fp8:backend=torch", ""),
    ):
        case, support = cases(Request("gemm", ("bf16", mode), axes=(("shape", ("64",)),)), facts)[mode]
        assert support.backend == backend and case.id.endswith(f"/{mode}")


def test_whole_layers_need_layers() -> None:
    request = Request("conv", ("bf16", "fp8"), backend="torchao")
    refused = cases(request, here(CPU, torchao="0.18.0"))["fp8:backend=torchao"][1]
    assert refused.level is Level.REFUSED
    assert "suite conv has none: choose early_exit, mlp, moe, transformer" in refused.reason
    taken = cases(replace(request, suite="mlp", axes=()), here(CPU, torchao="0.18.0"))["fp8:backend=torchao"][1]
    assert taken.level is Level.EMULATED and taken.backend == "torchao 0.18.0"


def test_an_unknown_backend_is_refused_before_anything_runs() -> None:
    with pytest.raises(UnknownName, match="Did you mean 'torch'"):
        check_request(Request("gemm", backend="torhc"))


class FakeDeepGemm(ModuleType):
    """DeepGEMM's product on capability 9.0, with the layouts that its C++ asserts."""

    calls: ClassVar[list[tuple[int, int, int]]] = []

    @staticmethod
    def fp8_gemm_nt(
        a: tuple[Tensor, Tensor],
        b: tuple[Tensor, Tensor],
        d: Tensor,
        c: Tensor | None = None,
        recipe: tuple[int, int, int] | None = None,
    ) -> None:
        assert recipe is not None
        values = []
        for (codes, scale), gran in zip((a, b), recipe[:2], strict=True):
            rows, columns = codes.shape
            assert codes.is_contiguous() and scale.dtype == torch.float32
            assert scale.shape == (-(-rows // gran), -(-columns // recipe[2]))
            assert gran == 1 or scale.is_contiguous() or scale.t().is_contiguous()
            values.append(
                codes.float() * scale.repeat_interleave(gran, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
            )
        # Row-wise times row-wise adds to a float32 sum; row-wise times block-wise writes bfloat16.
        assert (c is d and d.dtype == torch.float32) if recipe[1] == 1 else (c is None and d.dtype == torch.bfloat16)
        total = values[0] @ values[1].t()
        d.copy_(total if c is None else c + total)
        FakeDeepGemm.calls.append(recipe)


def test_deepgemm_multiplies_our_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_gemm", FakeDeepGemm("deep_gemm"))
    monkeypatch.setattr(FakeDeepGemm, "calls", [])
    precision = precisions.get("fp8-block:backend=deepgemm")
    theirs, ours = precision.arithmetic(H200), precisions.get("fp8-block").arithmetic(CPU)
    assert find_wrong_product(theirs, precision, CPU) == ""
    assert set(FakeDeepGemm.calls) == {(1, 128, 128), (1, 1, 128)}
    a, b = gaussian(64, 640).bfloat16(), gaussian(96, 640, seed=5).bfloat16()  # five blocks do not fill tiles
    results = [
        arithmetic.product(arithmetic.cast(a, Role.INPUT), arithmetic.cast(b, Role.WEIGHT), torch.bfloat16)
        for arithmetic in (theirs, ours)
    ]
    assert relative_frobenius(results[0].double(), results[1].double()) < 4e-3


def test_deepgemm_is_refused_where_it_has_no_kernel() -> None:
    for facts, mode, words in (
        (H200, "fp8-block", ""),
        (B200, "fp8-block", "only on capability 9.0 (H100, H200)"),
        (H200, "fp8", "deepgemm has no recipe fp8, only fp8-block"),
    ):
        result = support(f"{mode}:backend=deepgemm", facts, deep_gemm="2.5.0")
        assert words in result.reason and result.is_native is not bool(words)
    assert "pip install 'git+" in support("fp8-block:backend=deepgemm", H200).reason
