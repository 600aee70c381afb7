"""The user's modules and files: importing them, identifying their code, and describing their errors."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

from fp8bench.errors import Fp8benchError, ImportFailed
from fp8bench.files import check_file, read_file
from fp8bench.registry import devices, precisions, workloads
from fp8bench.user_code.switches import Switch, process_switches, put_back, values_of

# stdout and the switches belong to the process, so only one thread imports at a time.
_importing = threading.RLock()


def import_user_modules(names: Iterable[str], watched: Sequence[Switch] = ()) -> None:
    """Imports modules (or files ending in .py) that register a user's leaves. They print to stderr. A module that
    leaves a switch changed is refused, because it would affect everything measured afterwards, in this process and in
    those that it starts. The switches are `watched`, by default those of the process."""
    for registry in (workloads, precisions, devices):
        registry.names()  # fp8bench registers its names first, so that a user's file is refused, not fp8bench's
    watched = [switch for switch in watched or process_switches() if not switch.set_by_imports]
    with _importing:
        for name in names:
            _import(name, watched)


def _import(name: str, watched: Sequence[Switch]) -> None:
    before = values_of(watched)
    try:
        with _stdout_to_stderr():
            if name.endswith(".py"):
                _import_file(Path(name))
            elif getattr(importlib.import_module(name), "__file__", None) is None:
                raise IsADirectoryError(f"{name} is a directory without a module")
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # foreign code may raise anything
        raise ImportFailed(
            f"importing {name!r} failed: {own_words(error)}. Give a module's name, or the path of a Python file."
        ) from error
    finally:
        changed = put_back(watched, before)
    if changed:
        sys.modules.pop(user_module(name) if name.endswith(".py") else name, None)  # a retry fails alike
        raise ImportFailed(
            f"importing {name!r} leaves {', '.join(changed)}: everything would be measured under that. Set it in "
            "prepare or step, and put it back there."
        )


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Redirects what the body prints to stderr, also from child processes and C code. The descriptor is left alone if
    it is not stdout's: in a notebook, under a test that captures, or closed."""
    out = sys.stdout
    saved = -1
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if out.fileno() == 1:
            out.flush()
            saved = os.dup(1)
    try:
        if saved >= 0:
            try:
                os.dup2(sys.stderr.fileno(), 1)
            except (
                OSError,
                ValueError,
                AttributeError,
            ):  # stderr is closed, and 2 may be the number of a different file
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, 1)
                os.close(nowhere)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        if saved >= 0:
            with contextlib.suppress(OSError, ValueError):
                out.flush()  # text that bypassed the redirection must go to stderr, too
            os.dup2(saved, 1)
            os.close(saved)


def digest_of(names: Iterable[str]) -> str | None:
    """Returns one SHA-256 over the code of imported modules and files, a package with all its files; None without code.

    Their location is not included: the same code elsewhere has the same digest.
    """
    import hashlib

    digest = hashlib.sha256()
    files = list(chain.from_iterable(map(_files_of, names)))
    for file in files:
        digest.update(hashlib.sha256(read_file(file)).digest())
    return digest.hexdigest() if files else None


def _files_of(name: str) -> list[Path]:
    file = getattr(sys.modules.get(user_module(name) if name.endswith(".py") else name), "__file__", None)
    if not isinstance(file, str) or not Path(file).is_file():
        return []
    return sorted(Path(file).parent.rglob("*.py")) if Path(file).name == "__init__.py" else [Path(file)]


def own_words(error: BaseException) -> str:
    """Describes in one line what foreign code raised: kind, text, and the line of that code that led to it."""
    text = " ".join(str(error).split())[:300].rstrip(".")
    kind = "" if isinstance(error, Fp8benchError) else type(error).__name__
    words = ": ".join(part for part in (kind, text) if part)
    ours = (f"{Path(__file__).parents[1]}{os.sep}", f"{Path(importlib.__file__).parent}{os.sep}", "<")
    others = [summary for summary in traceback.extract_tb(error.__traceback__) if not summary.filename.startswith(ours)]
    theirs = [other for other in others if "site-packages" not in Path(other.filename).parts] or others
    return f"{words} ({Path(theirs[0].filename).name}, line {theirs[0].lineno})" if theirs else words


def user_module(file: str) -> str:
    """Returns the module name of a user's file; files with equal names in different folders get different ones."""
    import hashlib

    path = Path(file).resolve()
    return f"fp8bench_user_{path.stem}_{hashlib.sha256(os.fsencode(path)).hexdigest()[:8]}"


def _import_file(path: Path) -> None:
    path = path.resolve()
    name = user_module(str(path))
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory")
    if spec is None or spec.loader is None or not path.exists():
        raise FileNotFoundError(f"no such file: {path}")
    check_file(path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def modules_under(folder: Path) -> tuple[str, ...]:
    """Returns the loaded modules below a folder, links resolved, without fp8bench's own and installed packages."""
    top = folder.resolve()
    names = []
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or name.partition(".")[0] in ("fp8bench", "__main__"):
            continue
        # Synthetic modules (torch has some) name files that do not exist.
        path = Path(file).resolve() if Path(file).is_absolute() else Path()
        if path.is_relative_to(top) and not {"site-packages", "dist-packages"} & set(path.parts):
            names.append(name)
    return tuple(names)
