"""Allocators as the sides of a duel: which settings there are, what is refused, and that processes start under them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from fp8bench.errors import UsageError
from fp8bench.features.duel import partners
from fp8bench.features.duel.partners import _CALM, PartnerWorker, SideWorkers, not_preloaded, settings_of
from fp8bench.features.duel.run import _check_settings
from fp8bench.features.duel.sides import AS_IT_COMES, SAME, DuelQuestion, opened
from fp8bench.measure.arm import Quantisers
from fp8bench.measure.counting_worker import built
from fp8bench.model import Case, PlannedCase, Work
from fp8bench.model.raw import Settings
from fp8bench.registry import precisions
from tests.counts import for_each
from tests.workloads.steps import CPU

GLIBC = pytest.mark.skipif(sys.platform != "linux", reason="glibc's settings")


@for_each(
    ("words", "found"),
    [
        ([], ()),
        (["THP_MEM_ALLOC_ENABLE=1", "MALLOC_TOP_PAD_=0"], (("MALLOC_TOP_PAD_", "0"), ("THP_MEM_ALLOC_ENABLE", "1"))),
        (["GLIBC_TUNABLES=glibc.malloc.mmap_threshold=65536:glibc.malloc.arena_max=0x2"],
         (("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=65536:glibc.malloc.arena_max=0x2"),)),
    ],
)  # fmt: skip
@GLIBC
def test_settings_that_allocators_obey(words: list[str], found: tuple[tuple[str, str], ...]) -> None:
    assert settings_of(words, "--env-b") == found
    with pytest.raises(UsageError, match="twice"):
        settings_of(["MALLOC_ARENA_MAX=1", "MALLOC_ARENA_MAX=2"], "--env-a")


@for_each(
    ("word", "expected"),
    [
        ("", "sets no allocator"), ("=1", "sets no allocator"), ("MALLOC_ARENA_MAX", "sets no allocator"),
        ("MALLOC_AREN_MAX=1", "The nearest is MALLOC_ARENA_MAX"), ("PATH=/tmp", "sets no allocator"),
        ("OMP_NUM_THREADS=4", "sets no allocator"), ("MALLOC_ARENA_MAX=0", "a whole number from 1"),
        ("MALLOC_ARENA_MAX=two", "a whole number from 1"), ("MALLOC_MMAP_THRESHOLD_=-1", "a whole number from 0"),
        ("MALLOC_MMAP_THRESHOLD_=64KiB", "a whole number from 0"), ("MALLOC_TOP_PAD_=", "a whole number"),
        ("MALLOC_TOP_PAD_=²", "a whole number"), ("THP_MEM_ALLOC_ENABLE=yes", "one of 0, 1"),
        ("GLIBC_TUNABLES=glibc.malloc.mmap_treshold=1", "glibc.malloc.mmap_threshold"),
        ("GLIBC_TUNABLES=glibc.malloc.perturb=256", "from 0 to 255"),
        ("GLIBC_TUNABLES=glibc.malloc.arena_max=0", "a number from 1"),
        ("GLIBC_TUNABLES=", "NAME=VALUE"), ("GLIBC_TUNABLES=glibc.rtld.nns=5", "NAME=VALUE"),
        ("GLIBC_TUNABLES=glibc.malloc.mxfast=x", "to be a number"), ("LD_PRELOAD=", "is no library"),
        ("LD_PRELOAD=nosuchmalloc", "is no library"), ("LD_PRELOAD=/etc/passwd", "is no library"),
        ("LD_PRELOAD=/nowhere/lib.so", "is no library"), ("PYTORCH_CUDA_ALLOC_CONF=", "NAME:VALUE"),
        ("PYTORCH_CUDA_ALLOC_CONF=expandable_segment:True", "the nearest to 'expandable_segment'"),
        ("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:true", "one of True, False"),
        ("PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:19", "a whole number from 20"),
        ("PYTORCH_CUDA_ALLOC_CONF=garbage_collection_threshold:1.0", "a share"),
        ("PYTORCH_CUDA_ALLOC_CONF=roundup_power2_divisions:3", "a power of 2"),
    ],
)  # fmt: skip
@GLIBC
def test_what_an_allocator_would_pass_over_is_refused(word: str, expected: str) -> None:
    with pytest.raises(UsageError, match=re.escape(expected)) as refused:
        settings_of([word], "--env-b")
    assert "--env-b" in str(refused.value)


TORCH_TEXTS = (
        "expandable_segments:True", "max_split_size_mb:20", "max_split_size_mb:19", "garbage_collection_threshold:0.8",
        "garbage_collection_threshold:1.5", "roundup_power2_divisions:4", "roundup_power2_divisions:3",
        "roundup_power2_divisions:[256:1,512:2,>:8]", "expandable_segments:maybe", "max_split_size_mb:x",
        "garbage_collection_threshold:0.5,max_split_size_mb:64,expandable_segments:False",
)  # fmt: skip
PARSED = """
import torch
for text in {texts!r}:
    try:
        torch._C._accelerator_setAllocatorSettings(text)
        print("fine")
    except Exception:
        print("wrong")
"""


@pytest.mark.slow
def test_torchs_own_parser_agrees() -> None:
    """In a process of its own, since it keeps what it takes."""
    if not hasattr(torch._C, "_accelerator_setAllocatorSettings"):
        pytest.skip("this torch has no parser without CUDA")
    code = PARSED.format(texts=TORCH_TEXTS)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    ours = ["wrong" if partners._torch_options(text) else "fine" for text in TORCH_TEXTS]
    assert done.stdout.split() == ours and {"wrong", "fine"} == set(ours)


def test_sides_are_told_apart_by_their_settings() -> None:
    """In titles and environments; a duel's own settings of glibc leave both sides, and a note says so."""
    for env, host in (("MALLOC_ARENA_MAX=1", True), ("THP_MEM_ALLOC_ENABLE=1", False)):
        with opened(DuelQuestion(env_b=(env,)), ()) as (before, after, notes):
            name = env.partition("=")[0]
            assert (before.settings, after.settings) == ((), ((name, "1"),))
            assert after.title.endswith(f"under {env}") and "under" not in before.title
            assert notes == ((AS_IT_COMES,) if host else ())
            ours, theirs = (PartnerWorker(Settings(), side)._environment() for side in (before, after))
            assert theirs.pop(name) == "1" and theirs == ours
            assert (set(_CALM) <= set(ours)) is (not host or set(_CALM) <= set(os.environ))
    with opened(DuelQuestion(env_a=(env,), env_b=(env,)), ()) as (_, _, notes):
        assert notes == (SAME,)


def test_settings_of_a_gpus_allocator_need_a_case_on_one() -> None:
    """Else they would be ignored without a word."""
    case = PlannedCase(Case("gemm", (), "fp32", "cpu"), precisions.get("fp32").support(CPU), Work())
    with opened(DuelQuestion(env_b=("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",)), ()) as (_, after, _):
        side = SideWorkers(after, [PartnerWorker(Settings(), after)], Quantisers(), (CPU,), {"one": case})
        with pytest.raises(UsageError, match=r"PYTORCH_CUDA_ALLOC_CONF .* no case runs on one"):
            _check_settings(side)


def test_settings_are_one_change_and_a_revision_another() -> None:
    for other in ({"python_a": sys.executable}, {"against": "HEAD"}, {"against_self": "HEAD"}):
        with pytest.raises(UsageError, match="second change"):
            opened(DuelQuestion(env_a=("THP_MEM_ALLOC_ENABLE=1",), **other), ()).__enter__()  # type: ignore[arg-type]


@GLIBC
def test_a_preloaded_library_is_looked_for_in_the_process(tmp_path: Path) -> None:
    """The loader passes over one of another kind of machine; what it took stands in the process's own maps."""
    probe = built(tmp_path)
    assert isinstance(probe, Path)
    settings = settings_of([f"LD_PRELOAD={probe}"], "--env-b")
    child = subprocess.Popen(["sleep", "30"], env={**os.environ, **dict(settings)})
    try:
        for _ in range(100):  # until it has become the other program
            if not not_preloaded(settings, child.pid):
                break
            time.sleep(0.05)
        assert not_preloaded(settings, child.pid) == ""
        assert not_preloaded(settings, os.getpid()) == str(probe)
        assert not_preloaded(settings, child.pid, str(tmp_path / "{}")) == ""  # nobody can look
    finally:
        child.kill()
        child.wait()
