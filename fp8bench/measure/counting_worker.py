"""The worker that counts what steps ask of their allocator, in a process that nothing is timed in.

Its allocator is preceded by a small library of ours (allocator_probe.c), which the machine's own C compiler makes into
a private folder. Where there is none, or the system preloads nothing, the reason stands in the place of figures.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fp8bench.measure.handle import ProcessWorker
from fp8bench.model.raw import Settings

SOURCE = Path(__file__).with_name("allocator_probe.c")
_COMPILERS = ("cc", "gcc", "clang")
_SECONDS = 60.0


class CountingWorker(ProcessWorker):
    """A worker under the probe; `why` says why it is under none."""

    def __init__(self, settings: Settings, probe: Path | None, why: str = "") -> None:
        super().__init__(settings)
        self.why = why
        self._probe = probe

    def _environment(self) -> dict[str, str]:
        environment = super()._environment()
        if self._probe is not None:
            ahead = [str(self._probe), *environment.get("LD_PRELOAD", "").split()]
            environment["LD_PRELOAD"] = " ".join(ahead)
        return environment


@contextmanager
def counting_worker(settings: Settings) -> Iterator[CountingWorker]:
    with tempfile.TemporaryDirectory(prefix="fp8bench-probe-") as folder:
        probe = built(Path(folder))
        why = probe if isinstance(probe, str) else ""
        worker = CountingWorker(settings, None if isinstance(probe, str) else probe, why)
        try:
            yield worker
        finally:
            worker.close()


def built(folder: Path, system: str = sys.platform) -> Path | str:
    """The probe made in a folder, or why there is none."""
    if system != "linux":
        return f"calls of the allocator are counted on Linux, and this is {system}"
    named = os.environ.get("CC", "").split()[:1]
    compiler = next((found for name in (*named, *_COMPILERS) if (found := shutil.which(name))), None)
    if compiler is None:
        return "calls of the allocator are counted by a library that a C compiler makes, and there is none: install gcc"
    made = folder / "allocator_probe.so"
    command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(made), str(SOURCE), "-ldl"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_SECONDS, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{compiler} made no probe of the allocator: {error}"
    if done.returncode:
        words = next((line for line in done.stderr.splitlines() if "error" in line), "it does not say why")
        return f"{compiler} made no probe of the allocator: {words[:200]}"
    return made
