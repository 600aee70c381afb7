"""Compiled kernels of a CPU that are called again without torch's compiler."""

from __future__ import annotations

import grp
import json
import os
import pwd
import shutil
import sys
from pathlib import Path

import pytest
import torch

from fp8bench.files import add_checksum, format_compact_json, remove_checksum
from fp8bench.formats import compiling, fused, stored_kernels, vector_width
from fp8bench.formats.grids import E4M3
from suites.trials import run_command

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no compiler")
F32 = torch.float32
KERNEL = fused.ValuesKernel(E4M3, None, fused.Layout.FLAT, F32, F32, "cpu")

READ = """
import sys, torch
from fp8bench.formats import fused, stored_kernels, vector_width
from fp8bench.formats.grids import E4M3
vector_width.vector_widths = lambda device: ()
kernel = fused.ValuesKernel(E4M3, None, fused.Layout.FLAT, torch.float32, torch.float32, "cpu")
run, bits = stored_kernels.load_kernel(kernel)
given = kernel.examples()
run(*given)
torch.save(given, sys.argv[1])
sys.exit(" ".join({"torch._dynamo", "torch._inductor"} & {*sys.modules}) or 0)
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(vector_width, "vector_widths", lambda device: ())
    return tmp_path


def test_nothing_is_kept_of_a_gpu_or_before_it_is_compiled(cache: Path) -> None:
    assert stored_kernels.load_kernel(KERNEL) is None
    assert stored_kernels.load_kernel(fused.ValuesKernel(E4M3, None, fused.Layout.FLAT, F32, F32, "cuda:0")) is None
    stored_kernels.store_kernel(KERNEL, lambda *arguments: None, 0, [])
    assert not list(cache.iterdir())


@pytest.fixture
def kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that `read` accepts and executes, in the user's folder inside a sticky one."""
    monkeypatch.setattr(grp, "getgrgid", lambda number: grp.struct_group(("staff", "x", number, [])))
    file = cache / "user" / "fp8bench" / "kernel.json"
    file.parent.mkdir(parents=True)
    cache.chmod(0o1777)
    file.write_text(
        format_compact_json(
            add_checksum({"call": "def call(self, arguments): pass", "libraries": {}, "helpers": [], "bits": 7})
        )
    )
    monkeypatch.setattr(stored_kernels, "_find_kernel_path", lambda kernel: file)
    return file


def bits() -> int | None:
    read = stored_kernels.load_kernel(KERNEL)
    return None if read is None else read[1]


def test_what_is_kept_is_not_compiled_again(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_compile", lambda kernel: pytest.fail("it was compiled"))
    assert compiling.compile_kernel(KERNEL).bits == 7


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("others", [0o020, 0o002])
def test_what_others_may_have_written_is_not_run(place: int, others: int, kept: Path) -> None:
    """The file, its folder, and the parent folder, in which the folder could be replaced."""
    open_to_others = [kept, *kept.parents][place]
    assert bits() == 7
    open_to_others.chmod(open_to_others.stat().st_mode | others)
    assert bits() is None


def test_what_belongs_to_another_user_is_not_run(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about = Path.lstat

    def of_another(path: Path) -> os.stat_result:
        status = [*about(path)]
        return os.stat_result([*status[:4], 4242 if path == kept.parent.parent else status[4], *status[5:]])

    monkeypatch.setattr(Path, "lstat", of_another)
    assert bits() is None
    monkeypatch.undo()
    owner = os.getuid()
    monkeypatch.setattr(stored_kernels, "_find_kernel_path", lambda kernel: kept)
    assert bits() == 7
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    assert bits() is None


def test_a_group_of_this_user_alone_may_write(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = pwd.getpwuid(os.getuid()).pw_name
    kept.chmod(0o660)
    for members, read in (([], 7), ([name], 7), ([name, "other"], None)):
        monkeypatch.setattr(grp, "getgrgid", lambda number, of=members: grp.struct_group((name, "x", number, of)))
        assert bits() == read


def test_a_link_and_a_pipe_are_not_run(kept: Path) -> None:
    kept.rename(kept.with_name("other"))
    kept.symlink_to("other")
    assert bits() is None
    kept.unlink()
    os.mkfifo(kept)
    assert bits() is None


@pytest.mark.slow
def test_another_process_calls_it_without_the_compiler(cache: Path, tmp_path: Path) -> None:
    compiled = compiling.compile_kernel(KERNEL)
    given = KERNEL.examples()
    compiled.run(*given)
    (file,) = (cache / "fp8bench").glob("*.kernel.json")
    run_command((sys.executable, "-c", READ, str(tmp_path / "given")))
    assert all(map(torch.equal, given, torch.load(tmp_path / "given")))
    result = remove_checksum(json.loads(file.read_bytes()))
    assert stored_kernels.load_kernel(KERNEL) is not None
    ((name, (library, digest)),) = result["libraries"].items()
    Path(library).chmod(0o757)
    assert stored_kernels.load_kernel(KERNEL) is None
    Path(library).chmod(0o755)
    for wrong in ({**result, "libraries": {name: [library, "0" * 64]}}, {**result, "call": "def call(self, args: "}):
        file.write_text(format_compact_json(add_checksum(wrong)))
        assert stored_kernels.load_kernel(KERNEL) is None
    file.write_text("{")
    assert stored_kernels.load_kernel(KERNEL) is None and digest
