"""Compiled kernels of a CPU that are called again without torch's compiler."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

from fp8bench.files import compact, sealed, unsealed
from fp8bench.formats import compiling, fused, kept_kernels, vector_width
from fp8bench.formats.grids import E4M3
from suites.trials import ran

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no compiler")
F32 = torch.float32
KERNEL = fused.ValuesKernel(E4M3, None, fused.Layout.FLAT, F32, F32, "cpu")

READ = """
import sys, torch
from fp8bench.formats import fused, kept_kernels
from fp8bench.formats.grids import E4M3
kernel = fused.ValuesKernel(E4M3, None, fused.Layout.FLAT, torch.float32, torch.float32, "cpu")
run, bits = kept_kernels.read(kernel)
given = kernel.examples()
run(*given)
torch.save(given, sys.argv[1])
sys.exit(" ".join({"torch._dynamo", "torch._inductor"} & {*sys.modules}) or 0)
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(vector_width, "widths", lambda device: ())
    return tmp_path


def test_nothing_is_kept_of_a_gpu_or_before_it_is_compiled(cache: Path) -> None:
    assert kept_kernels.read(KERNEL) is None
    assert kept_kernels.read(fused.ValuesKernel(E4M3, None, fused.Layout.FLAT, F32, F32, "cuda:0")) is None
    kept_kernels.keep(KERNEL, lambda *arguments: None, 0, [])
    assert not list(cache.iterdir())


def test_what_others_may_have_written_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "kernel"
    file.touch()
    assert kept_kernels._is_own(file)
    for place in (file, tmp_path):
        mode = place.stat().st_mode
        for others in (0o020, 0o002):
            place.chmod(mode | others)
            assert not kept_kernels._is_own(file)
        place.chmod(mode)
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    assert not kept_kernels._is_own(file)


@pytest.mark.slow
def test_another_process_calls_it_without_the_compiler(cache: Path, tmp_path: Path) -> None:
    compiled = compiling.compiled(KERNEL)
    given = KERNEL.examples()
    compiled.run(*given)
    (file,) = (cache / "fp8bench").glob("*.kernel.json")
    monkeyed = READ.replace("run, bits", "from fp8bench.formats import vector_width\n"
                            "vector_width.widths = lambda device: ()\nrun, bits")  # fmt: skip
    ran((sys.executable, "-c", monkeyed, str(tmp_path / "given")))
    assert all(map(torch.equal, given, torch.load(tmp_path / "given")))
    found = unsealed(json.loads(file.read_bytes()))
    for open_to_others in (file, file.parent):
        mode = open_to_others.stat().st_mode
        open_to_others.chmod(mode | 0o020)
        assert kept_kernels.read(KERNEL) is None
        open_to_others.chmod(mode)
    assert kept_kernels.read(KERNEL) is not None
    ((name, (library, digest)),) = found["libraries"].items()
    for wrong in ({**found, "libraries": {name: [library, "0" * 64]}}, {**found, "call": "def call(self, args: "}):
        file.write_text(compact(sealed(wrong)))
        assert kept_kernels.read(KERNEL) is None
    file.write_text("{")
    assert kept_kernels.read(KERNEL) is None and digest
