"""Recipes that cannot be, through every door: one sentence, exit 2, nothing measured and nothing written."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from fp8bench import pipeline
from fp8bench.cli.main import main
from fp8bench.formats import scaled
from fp8bench.formats.grids import E2M1, E4M3
from fp8bench.formats.quantise import round_to
from fp8bench.formats.recipes import MX, NVFP4, TENSOR
from tests.commands import only_sentence
from tests.counts import for_each

# Values of --dtypes, and text that the message must contain.
MODES = [
    ("fp9", "unknown precision 'fp9'. Did you mean 'fp8'"),
    ("float8_e4m3fn", "unknown precision 'float8_e4m3fn'. Did you mean 'fp8-e4m3'?"),
    ("torch.half", "Did you mean 'fp16'?"),
    ("bfloat16", "Did you mean 'bf16'?"),
    ("fp64", "all errors are already relative to fp64. The usual reference is fp32"),
    ("fp8-dealyed", "Did you mean 'fp8-delayed'"),
    ("fp8-delayed:hsitory=3", "unknown option of dtype fp8-delayed 'hsitory'. Did you mean 'history'"),
    ("mxfp8:history=3", "unknown option of dtype mxfp8 'history'"),
    ("bf16:scale=pow2", "unknown option of dtype bf16 'scale'"),
    ("fp8-delayed:history=0", "history cannot be '0': expected a whole number from 1"),
    ("fp8-delayed:history=many", "history cannot be 'many': expected a whole number"),
    ("fp8-delayed:history=1e3", "history cannot be '1e3'"),
    ("fp8-delayed:margin=-1", "margin cannot be '-1': expected a whole number from 0"),
    ("fp8-delayed:interval=0", "interval cannot be '0'"),
    ("fp8-delayed:algorithm=mean", "algorithm cannot be 'mean': expected one of max, most_recent"),
    ("fp8-delayed:history=3:history=4", "gives history twice"),
    ("fp8:formats=hybird", "the nearest is 'hybrid'"),
    ("fp8:", "after a colon, expected OPTION=VALUE"),
    ("fp8:scale", "has 'scale' after a colon, expected OPTION=VALUE"),
    ("fp8:=exact", "has '=exact' after a colon, expected OPTION=VALUE"),
    ("mxfp8:scale=exact", "scale cannot be 'exact': expected one of floor, even, ceil, rceil"),
    ("nvfp4:hadamard=on:weight-gradient=bf16", "leave one out"),
    ("custom:weight=e5m2:format=e2m1:scaling=nvfp4", "NVFP4's scales are for e2m1 elements, not for e5m2"),
    ("custom:format=bf16:scaling=mx", "MX blocks hold"),
    ("custom:format=e8m0", "format cannot be 'e8m0'"),
    ("custom:scaling=1x64", "scaling cannot be '1x64': expected one of"),
    ("custom:scaling=none:scale=pow2", "leave one out"),
    ("custom:scaling=tensor:scale=rceil", "not rounded by"),
]


@pytest.fixture
def nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory in which starting a worker is an error, checked at the end."""

    def never(*arguments: object) -> None:
        raise AssertionError("a worker was started")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(pipeline, "ProcessWorker", never)
    monkeypatch.setattr(pipeline, "LocalWorker", never)
    return tmp_path


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The only sentence on stderr of a refused command."""
    assert main(list(words)) == 2
    shown = capsys.readouterr()
    assert not shown.out
    return only_sentence(shown.err)


@for_each(("mode", "said"), MODES)
def test_bad_modes_are_refused_on_the_command_line(
    nothing_runs: Path, capsys: pytest.CaptureFixture[str], mode: str, said: str
) -> None:
    assert said in refused(capsys, "suite", "gemm", "--set", "shape=64", "--dtypes", f"bf16,{mode}")
    assert said in refused(capsys, "suite", "gemm", "--set", "shape=64", "--reference", mode)
    assert said in refused(capsys, "suite", "mlp", "--dtypes", "bf16,fp8", "--precision-map", f"up={mode}")
    assert said in refused(capsys, "lint-shapes", "nano", "--dtypes", mode)
    assert not list(nothing_runs.iterdir())


@for_each(
    "tensor",
    [
        torch.ones(4, 64, dtype=torch.int64),
        torch.ones(4, 64, dtype=torch.uint8),
        torch.ones(4, 64, dtype=torch.bool),
        torch.ones(4, 64, dtype=torch.complex64),
        torch.ones(4, 64, dtype=torch.float64),
        torch.ones(4, 64).to(torch.float8_e4m3fn),
    ],
)
def test_tensors_that_are_no_numbers_of_a_network(tensor: torch.Tensor) -> None:
    for call in (
        lambda: round_to(tensor, E4M3),
        lambda: scaled.values(tensor, E4M3, TENSOR),
        lambda: scaled.values(tensor, E2M1, NVFP4),
        lambda: scaled.quantise(tensor, E4M3, MX),
        lambda: scaled.factor(tensor, E4M3, TENSOR),
    ):
        with pytest.raises(TypeError, match=r"cannot quantise .*: give a tensor of float32, bfloat16 or float16"):
            call()
