"""Whether a word names a Python that a worker can run in: asked before anything slow is started."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from fp8bench.errors import UsageError

OLDEST = (3, 11)
_SECONDS = 60.0
_ASK = "import sys; print('python %d.%d.%d' % sys.version_info[:3])"


def interpreter(word: str, option: str) -> str:
    """The interpreter a word means: a program's name or path, or the folder of a virtual environment.

    Links are not followed: a virtual environment's Python is one, and its packages hang on it.
    """
    folder = Path(word) / "bin" / "python"
    found = str(folder) if Path(word).is_dir() and folder.exists() else shutil.which(word)
    if found is None:
        raise UsageError(
            f"{option} {word!r:.200} is no program. Give a Python's name or path, or a virtual environment's folder."
        )
    path = str(Path(found).absolute())
    version = _version(path, f"{option} {word!r:.200}")
    if version[:2] < OLDEST:
        raise UsageError(
            f"{option} {word!r:.200} is Python {'.'.join(map(str, version))}, and fp8bench needs "
            f"{'.'.join(map(str, OLDEST))} or newer there too. Give a newer one."
        )
    return path


def _version(path: str, given: str) -> tuple[int, ...]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHOME"}
    try:
        done = subprocess.run(
            [path, "-I", "-c", _ASK], capture_output=True, text=True, errors="replace", timeout=_SECONDS, check=False,
            stdin=subprocess.DEVNULL, env=environment,
        )  # fmt: skip
    except OSError as error:
        raise UsageError(f"{given} cannot be run ({error.strerror}). Give a Python.") from None
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"{given} did not say within {_SECONDS:g} s which Python it is, and was ended. Give a Python."
        ) from None
    said = re.fullmatch(r"python (\d+)\.(\d+)\.(\d+)", done.stdout.strip())
    if done.returncode or said is None:
        words = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1][:200]
        raise UsageError(
            f"{given} is no Python that runs: asked for its version, it ended with status {done.returncode} and said "
            f"{words!r}. Give a Python."
        )
    return tuple(map(int, said.groups()))
