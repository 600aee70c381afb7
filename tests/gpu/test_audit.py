"""An audit on a GPU: a kernel on its caller's stream passes, and one that takes another is caught."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fp8bench.features.audit.results import RESULT_CHECKS
from fp8bench.user_code.named import make_signature
from suites.audit import codes_of, result_of
from suites.audit_kernels import Kernel

pytestmark = pytest.mark.gpu
_WIDE = make_signature("product", "bf16")
MEMORY = [check for check in RESULT_CHECKS if check.name == "memory"]


def _elsewhere(a: Tensor, b: Tensor) -> Tensor:
    with torch.cuda.stream(torch.cuda.default_stream(a.device)):
        return a @ b.t()


def test_a_stream_that_nobody_waits_for() -> None:
    assert codes_of(result_of(Kernel("", _WIDE, _elsewhere), "cuda", MEMORY)) == "stream"
    assert codes_of(result_of(Kernel("", _WIDE, lambda a, b: a @ b.t()), "cuda", MEMORY)) == "-"
