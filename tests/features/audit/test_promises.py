"""Which results keep a promise, and what the others are called."""

from __future__ import annotations

import torch

from fp8bench.features.audit.auditor import SUBJECT_BY_KIND, AuditInput, AuditSession, Shape
from fp8bench.features.audit.host import KernelHost
from fp8bench.features.audit.operands import DRAW_FUNCTIONS_BY_DATA_KIND, round_operand
from fp8bench.features.audit.values import AuditFinding
from fp8bench.formats.operators import values
from fp8bench.model.promises import AuditedCallableKind
from fp8bench.registry import precisions
from fp8bench.user_code.named import make_signature
from suites.audit_kernels import MXFP8, Product, product
from suites.audit_lies import HONEST, LIES
from tests.counts import for_each
from tests.facts import CPU
from tests.features.audit.auditors import make_auditor

RECIPES = ("fp8", "fp8-rowwise", "fp8-block", "mxfp8", "mxfp6", "mxfp4", "nvfp4", "fp8-e5m2")
SHAPE = Shape(32, 48, 256)
_BY_NAME = {kernel.name: kernel for kernel in (*LIES, *HONEST)}


def judged(auditor: AuditSession, data: str = "normal", shape: Shape = SHAPE) -> AuditFinding:
    matrices = auditor.draw_matrices(AuditInput(data, shape))
    ((name, expected),) = auditor.subject.expected_results(matrices).items()
    return expected.judge(auditor.compute_results(matrices)[name])


@for_each("name", RECIPES)
@for_each("shape", [(8, 256), (130, 96), (33, 300)])
def test_a_matrix_that_is_taken_apart_is_what_its_recipe_leaves(name: str, shape: tuple[int, int]) -> None:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    for treatment in precisions.get(name).recipe.treatments[:2]:  # type: ignore[attr-defined]
        assert torch.equal(round_operand(x, treatment).values, values(x, treatment.fmt, treatment.scaling))


@for_each(
    ("function", "precision", "data", "code"),
    [
        *((lambda a, b: product(a, b, MXFP8), "mxfp8", data, "") for data in DRAW_FUNCTIONS_BY_DATA_KIND),
        # Sums that overflow their dtype are nobody's mistake.
        (lambda a, b: a @ b.t(), "fp16", "outliers along the contraction", ""),
        (lambda a, b: a, "fp8", "normal", "shape"),
        (lambda a, b: (a @ b.t()).to(torch.int32), "fp8", "normal", "dtype"),
        (lambda a, b: (a @ b.t()).to(torch.float8_e4m3fn), "fp8", "normal", "dtype"),
        (lambda a, b: a.double() @ b.double().t(), "bf16", "normal", ""),
        # Zeros are close to any shrinking error, so none is diagnosed.
        (lambda a, b: a @ b.t() * 0, "fp8", "normal", "wrong-values"),
        (lambda a, b: (a @ b.t()) / 0, "fp8", "normal", "not-finite"),
    ],
)
def test_products_are_judged_by_their_promise(function: Product, precision: str, data: str, code: str) -> None:
    assert judged(make_auditor(function, precision), data).code == code


LARGE, SMALL = Shape(64, 4, 64), Shape(33, 3, 128)


@for_each(
    "name",
    [
        "bf16 under the name of fp8",
        "scales rounded up",
        "blocks along the wrong dimension",
        "the first block's scale for all",
        "cast to a different format",
        "codes read as another format's",
        "the codes of a byte exchanged",
        "the tensor's scale left out",
        "sums kept in bf16",
        "cut toward zero",
        "one scale of two is applied",
        "0.2% too large",
        "torch's attention",
        "torch's causal attention",
        "attention that is not fused",
        "attention in mxfp8",
        "attention in bf16 for mxfp8",
        "scores that are not scaled",
        "scores scaled by the size",
        "no causal mask",
    ],
)
def test_mistakes_are_diagnosed_by_name(name: str) -> None:
    kernel = _BY_NAME[name]
    kind = kernel.signature.kind
    code = kernel.code
    data = "rows of different sizes" if code == "blocks-turned" else "normal"
    subject = SUBJECT_BY_KIND[kind](KernelHost(kernel.made(), kernel.signature, CPU), kernel.signature, CPU)
    for shape in (LARGE, SMALL) if kind is AuditedCallableKind.ATTENTION else (SHAPE,):
        assert judged(AuditSession(subject, 0), data, shape).code == code


@for_each("data", ["normal", "zeros", "infinite"])
def test_codes_of_nvfp4_have_both_scales_of_their_tensors(data: str) -> None:
    audited = SUBJECT_BY_KIND[AuditedCallableKind.PRODUCT](product, make_signature("product", "nvfp4", "codes"), CPU)
    a, b = audited.draw_operands("zeros" if data == "zeros" else "normal", SHAPE, 0)
    a[0, 0] = torch.inf if data == "infinite" else a[0, 0]
    *_, first, second = arguments = audited.make_arguments((a, b))
    assert len(arguments) == 6 and first.shape == second.shape == () and (first == 1) == (data != "normal")


@for_each("precision", ["nvfp4", "mxfp4", "fp8"])
def test_products_of_zeros_keep_a_promise_of_any_casts(precision: str) -> None:
    """Two random casts of zeros have no error to compare."""
    layer = make_auditor(product, precision, "linear").subject
    promises = layer.expected_results(layer.draw_operands("zeros", Shape(64, 64, 64), 0))
    verdicts = {name: promise.judge(torch.zeros(64, 64)) for name, promise in promises.items()}
    assert len(verdicts) > 1 and not [name for name, verdict in verdicts.items() if verdict.has_failed]
