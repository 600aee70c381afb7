"""How wide a kernel's vectors are: measured, chosen, and kept, with kernels that are slow on purpose."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fp8bench.formats import compiling, fused, operators, vector_width
from fp8bench.formats.code_kernels import RowCodesKernel
from fp8bench.formats.grids import E4M3
from fp8bench.formats.recipes import ScaleRounding
from fp8bench.formats.vector_width import StoredWidthChoice, choose_vector_width
from tests.counts import for_each, sampled
from tests.formats.test_operators import ASKED, AWKWARD, Asked, called, differences, eagerly

F32 = torch.float32
KERNEL = fused.ValuesKernel(E4M3, None, fused.Layout.FLAT, F32, F32, "cpu")
Planted = Callable[[dict[int, float]], list[int]]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of choices, on a CPU with two widths."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    return tmp_path / "fp8bench"


@pytest.fixture
def planted(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Planted:
    """Kernels that take the given seconds by width, or do not compile if 0; returns what was compiled."""

    def plant(seconds: dict[int, float]) -> list[int]:
        built: list[int] = []

        def build(kernel: compiling.Kernel, bits: int = 0) -> Callable[..., object]:
            built.append(bits)
            if not seconds.get(bits):
                raise RuntimeError(f"no {bits} bits here")

            def run(*arguments: object) -> None:
                end = time.thread_time() + seconds[bits]
                while time.thread_time() < end:
                    pass

            return run

        monkeypatch.setattr(compiling, "_compile_with_vector_width", build)
        return built

    return plant


@for_each(
    ("seconds", "bits"),
    [
        ({256: 1.0, 512: 7.0}, 256),
        ({256: 1.0, 512: 0.5}, 512),
        ({256: 1.0, 512: 0.95}, 256),
        ({512: 1.0}, 512),
        ({256: 1.0}, 256),
    ],
)
def test_wider_vectors_are_taken_where_they_save_a_tenth(seconds: dict[int, float], bits: int) -> None:
    assert choose_vector_width(seconds) == bits


@pytest.mark.parametrize(("seconds", "bits"), [({256: 5e-4, 512: 5e-3}, 256), ({256: 5e-3, 512: 5e-4}, 512)])
def test_the_faster_width_is_found_and_kept(
    seconds: dict[int, float], bits: int, planted: Planted, cache: Path
) -> None:
    built = planted(seconds)
    assert compiling.compile_kernel(KERNEL).bits == bits and built == [256, 512]
    assert compiling.compile_kernel(KERNEL).bits == bits and built == [256, 512, bits]
    (stored,) = cache.glob("*.json")
    told = json.loads(stored.read_text())
    assert told["bits"] == bits and told["kernel"] == str(KERNEL) and set(told["seconds"]) == {"256", "512"}


def test_a_width_that_does_not_compile_is_not_taken(planted: Planted) -> None:
    planted({})
    with pytest.raises(RuntimeError, match="no 256 bits"):
        compiling.compile_kernel(KERNEL)
    planted({512: 1e-4})
    before = torch.get_num_threads()
    assert compiling.compile_kernel(KERNEL).bits == 512 and torch.get_num_threads() == before
    planted({256: 1e-4})
    assert (
        compiling.compile_kernel(fused.ValuesKernel(E4M3, None, fused.Layout.FLAT, torch.bfloat16, F32, "cpu")).bits
        == 256
    )


@pytest.mark.usefixtures("cache")
def test_the_first_choice_counts_for_all() -> None:
    """Two workers that measure at once use the same width, otherwise identical code would differ."""
    one, other = StoredWidthChoice("a kernel"), StoredWidthChoice("a kernel")
    assert one.read() is None
    assert one.store(512) == 512 and other.store(256) == 512 and other.read() == 512
    assert StoredWidthChoice("another kernel").read() is None


def test_a_file_that_says_nothing_or_cannot_be_written_is_measured_anew(cache: Path) -> None:
    StoredWidthChoice("a kernel").store(512)
    (path,) = cache.glob("*.json")
    for content in ("", "{", "[]", "{}", '{"bits": 128}', '{"bits": [512]}', '"512"'):
        path.write_text(content)
        assert StoredWidthChoice("a kernel").read() is None, content
        assert StoredWidthChoice("a kernel").store(256) == 256 and StoredWidthChoice("a kernel").read() == 256
    cache.rename(cache.with_name("aside"))
    cache.write_text("a file where the folder would be")
    assert StoredWidthChoice("a kernel").store(512) == 512 and StoredWidthChoice("a kernel").read() is None


@pytest.mark.usefixtures("cache")
def test_wide_kernels_are_compiled_for_wide_vectors_whatever_the_processor() -> None:
    """gcc prefers 256 bits when tuning for some Intel CPUs, which makes e4m3 ten times as slow."""
    from torch._inductor import config

    wide, narrow = (compiling._list_inductor_options(KERNEL, bits, config) for bits in (512, 256))
    assert (wide["cpp.simdlen"], narrow["cpp.simdlen"]) == (512, 256) and "cpp.march" not in narrow
    assert wide["cpp.vec_isa_ok"] is True  # no process starts for a fact that torch already knows
    assert wide.get("cpp.march", "") == "native -mprefer-vector-width=512" * hasattr(config.cpp, "march")


@pytest.mark.slow
@pytest.mark.skipif(not vector_width.vector_widths("cpu"), reason="this processor has no vectors of 512 bits")
@pytest.mark.parametrize("asked", sampled([ASKED[0]], [ASKED[0], ASKED[14], ASKED[18]]), ids=str)
@for_each("bits", vector_width.vector_widths("cpu") or (vector_width.NARROW_BITS,))  # of none, skipped
def test_fused_is_eager_bit_by_bit_with_either_width(bits: int, asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "KERNELS", operators.Kernels())
    monkeypatch.setattr(vector_width, "vector_widths", lambda device: (bits,))
    x = AWKWARD.to(asked.source)
    called(x, asked)
    operators.KERNELS.compile(*operators.KERNELS.wanted)
    assert differences(called(x, asked), eagerly(x, asked)) == 0
    assert dict(operators.KERNELS.fused) == {bits: 1}


@for_each(("block", "turned"), [(0, False), (0, True), (128, False), (128, True)])
def test_a_kernel_of_row_scales_is_tried_on_a_whole_matrix(block: int, turned: bool) -> None:
    kernel = RowCodesKernel(E4M3, ScaleRounding.EXACT, torch.bfloat16, "cpu", 16, block, turned)
    source, out, inverse = kernel.examples()
    assert source.numel() == out.numel() > 0
    kernel(source, out, inverse)
    assert inverse.isfinite().all()
