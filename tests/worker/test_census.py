"""Public names of torch that could be switches are watched or excluded with a reason.

And functions missing from torch's lists.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fp8bench.model.raw import Settings
from fp8bench.user_code.switches import Unset, UnusedLibraryValue, make_plain, read_values, restore_values
from fp8bench.worker import torch_state, torch_switches
from fp8bench.worker.bench import Bench
from fp8bench.worker.switches import switches
from fp8bench.worker.torch_state import read_cublaslt_version
from tests.counts import for_each
from tests.worker.census import TABLE, census, decided, versions

HERE = ".".join(torch.__version__.split(".")[:2])
WATCHED = "watched"
ON_A_GPU = "watched where there is a GPU"


@pytest.mark.slow
def test_every_name_of_the_installed_torch_is_decided() -> None:
    assert HERE in versions(), f"read torch {HERE} with python -m tests.worker.census, and decide on what is new"
    names = census(Path(torch.__file__).parent)
    known = decided(HERE)
    assert names - known.keys() == set(), f"decide on these in {TABLE.name}"
    assert known.keys() - names == set(), f"torch {HERE}no longer has these: say so in{TABLE.name}"
    # Includes what the interpreter sees: C has functions that no file mentions.
    assert {f"torch.{name}" for name in dir(torch) if name.startswith("set_")} <= known.keys()


@for_each("version", versions())
def test_what_the_table_calls_watched_is_watched(version: str) -> None:
    known = decided(version)
    later = versions().index(version) > versions().index(HERE)
    if later:
        known = {name: heading for name, heading in known.items() if name in decided(HERE)}
    watched = {name for switch in switches() for name in switch.names}
    table = {name for name, heading in known.items() if heading == WATCHED}
    assert table - watched == set()
    assert {name for name in watched if name in known} - table == set()
    assert watched - known.keys() <= {name for other in versions() for name in decided(other)}
    headings = set(decided(version).values())  # an exclusion has a reason
    assert {WATCHED, ON_A_GPU} < headings and all(len(heading.split()) > 1 for heading in headings - {WATCHED})


def test_those_of_gpus_are_watched_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    of_gpus = list(torch_switches._list_gpu_switches())
    table = {name for name, heading in decided(HERE).items() if heading == ON_A_GPU}
    assert {name for switch in of_gpus for name in switch.names} == table
    if not torch.cuda.is_initialized():
        assert all(
            switch.read() is (UnusedLibraryValue if switch.usual is Unset else switch.usual) for switch in of_gpus
        )


def test_a_gpu_that_comes_into_use_within_a_step_has_changed_no_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's optimizers query a GPU's stream. A regression: every CPU step failed because of cuFFT's plans."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cuda, "cufft_plan_cache", SimpleNamespace(max_size=4096))
    plans = [switch for switch in torch_switches._list_gpu_switches() if switch.name == "cuFFT's plans"]
    used = [False]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: used[0])
    before = read_values(plans)
    assert [make_plain(value) for value in before] == [None]
    used[0] = True
    assert restore_values(plans, before) == []
    before = read_values(plans)
    torch.backends.cuda.cufft_plan_cache.max_size = 7
    assert restore_values(plans, before) == ["cuFFT's plans at 7 (it was 4096)"]
    assert torch.backends.cuda.cufft_plan_cache.max_size == 4096


def test_a_torch_that_does_not_say_whether_it_pools_memory_pools_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A regression: with torch 2.11 every case on a GPU failed."""
    name = "_cuda_cudaCachingAllocator_is_enabled"
    monkeypatch.setattr(torch._C, name, lambda: False, raising=False)
    assert torch_state.has_memory_pool() is False
    monkeypatch.delattr(torch._C, name)
    assert torch_state.has_memory_pool() is True


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_a_library_that_is_loaded_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries the file mapped by the process, as another of that name may be first on the path."""
    library = tmp_path / "libcublasLt.so.13"
    maps = tmp_path / "maps"
    code = b"#include <stddef.h>\nsize_t cublasLtGetVersion(void) { return 130100; }"
    subprocess.run(["gcc", "-shared", "-fPIC", "-xc", "-", "-o", str(library)], input=code, check=True)
    maps.write_text(f"7f00-7f01 r-xp 00000000 08:01 1 /lib/libc.so.6\n7f02-7f03 r-xp 00000000 08:01 2    {library}\n")
    monkeypatch.setattr(torch_state, "_MAPS_FILE", maps)
    assert read_cublaslt_version() == 130100


@for_each("line", ["", "7f00-7f01 r-xp 00000000 08:01 1 /gone/libcublasLt.so.13 (deleted)"])
def test_what_is_not_there_has_no_version(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maps = tmp_path / "maps"
    maps.write_text(line)
    monkeypatch.setattr(torch_state, "_MAPS_FILE", maps)
    assert read_cublaslt_version() is None
    monkeypatch.setattr(torch_state, "_MAPS_FILE", tmp_path / "nothing")
    assert read_cublaslt_version() is None


def test_a_run_says_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Bench(Settings())
    try:
        monkeypatch.setattr(torch_state, "read_cublaslt_version", lambda: 130100)
        assert told.software()["cublaslt"] == 130100
    finally:
        told.close()
