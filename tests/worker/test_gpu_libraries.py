"""Versions that torch does not tell."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from fp8bench.model.raw import Settings
from fp8bench.worker import torch_state
from fp8bench.worker.bench import Bench
from fp8bench.worker.torch_state import cublaslt_version
from tests.counts import for_each


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_a_library_that_is_loaded_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the file that the process has mapped, wherever it lies: the first of that name on a path may be another."""
    library, maps = tmp_path / "libcublasLt.so.13", tmp_path / "maps"
    code = b"#include <stddef.h>\nsize_t cublasLtGetVersion(void) { return 130100; }"
    subprocess.run(["gcc", "-shared", "-fPIC", "-xc", "-", "-o", str(library)], input=code, check=True)
    maps.write_text(f"7f00-7f01 r-xp 00000000 08:01 1 /lib/libc.so.6\n7f02-7f03 r-xp 00000000 08:01 2    {library}\n")
    monkeypatch.setattr(torch_state, "_MAPS", maps)
    assert cublaslt_version() == 130100


@for_each("line", ["", "7f00-7f01 r-xp 00000000 08:01 1 /gone/libcublasLt.so.13 (deleted)"])
def test_what_is_not_there_has_no_version(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maps = tmp_path / "maps"
    maps.write_text(line)
    monkeypatch.setattr(torch_state, "_MAPS", maps)
    assert cublaslt_version() is None
    monkeypatch.setattr(torch_state, "_MAPS", tmp_path / "nothing")
    assert cublaslt_version() is None


def test_a_run_says_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Bench(Settings())
    try:
        monkeypatch.setattr(torch_state, "cublaslt_version", lambda: 130100)
        assert told.software()["cublaslt"] == 130100
    finally:
        told.close()
