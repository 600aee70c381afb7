"""Imports the user's modules and files, identifies their code, and describes their errors."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

from fp8bench.errors import Fp8benchError, ImportFailed
from fp8bench.files import check_file, read_file
from fp8bench.registry import devices, precisions, workloads
from fp8bench.user_code.switches import Switch, list_process_switches, read_values, restore_values

# stdout and the global settings belong to the whole process, so only one thread may import at a time.
_import_lock = threading.RLock()


def import_user_modules(names: Iterable[str], watched: Sequence[Switch] = ()) -> None:
    """Imports modules, or files ending in .py, that register a user's workloads, precisions or devices.

    Their output goes to stderr. A module is refused if it changes one of the `watched` switches (global settings), by
    default those of the process: a changed switch would affect all later measurements, in this process and in processes
    that it starts. Switches that imports of harmless packages also change (`is_set_by_imports`) are not watched.
    """
    for registry in (workloads, precisions, devices):
        # register fp8bench's names first, so that a duplicate name of the user is refused, and not fp8bench's own
        registry.names()
    watched = [switch for switch in watched or list_process_switches() if not switch.is_set_by_imports]
    with _import_lock:
        for name in names:
            _import_module(name, watched)


def _import_module(name: str, watched_switches: Sequence[Switch]) -> None:
    old_switch_values = read_values(watched_switches)
    try:
        with _stdout_to_stderr():
            if name.endswith(".py"):
                _import_file(Path(name))
            else:
                module = importlib.import_module(name)
                if getattr(module, "__file__", None) is None:
                    raise IsADirectoryError(f"{name} is a directory without a module")
    except KeyboardInterrupt:
        raise  # an interruption is not an error of the user's module
    except BaseException as error:  # a user's code may raise anything
        error_text = own_words(error)  # the kind, text and line of the error
        raise ImportFailed(
            f"importing {name!r} failed: {error_text}. Give a module, or the path of a Python file, that Python "
            "can import."
        ) from error
    finally:
        changed_switches = restore_values(watched_switches, old_switch_values)
    if changed_switches:
        # remove the module, so that a second import fails in the same way
        sys.modules.pop(user_module(name), None)
        raise ImportFailed(
            f"importing {name!r} leaves {', '.join(changed_switches)}: all later measurements would run with that. "
            "Set it in prepare or step, and restore it there."
        )


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Redirects stdout to stderr within the `with` block, also for child processes and C code. Leaves the file
    descriptor 1 unchanged if sys.stdout does not use it, as in a notebook, in a test that captures output, or after
    stdout was closed.
    """
    stdout = sys.stdout
    saved_stdout_descriptor = -1
    with contextlib.suppress(OSError, ValueError, AttributeError):  # sys.stdout may be closed, replaced or None
        if stdout.fileno() == 1:
            stdout.flush()
            saved_stdout_descriptor = os.dup(1)
    try:
        if saved_stdout_descriptor >= 0:
            try:
                os.dup2(sys.stderr.fileno(), 1)
            except (OSError, ValueError, AttributeError):
                # stderr is closed, and descriptor 2 may belong to a different file
                devnull_descriptor = os.open(os.devnull, os.O_WRONLY)
                os.dup2(devnull_descriptor, 1)
                os.close(devnull_descriptor)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        if saved_stdout_descriptor >= 0:
            with contextlib.suppress(OSError, ValueError):
                stdout.flush()  # buffered text must go to stderr as well
            os.dup2(saved_stdout_descriptor, 1)
            os.close(saved_stdout_descriptor)


def hash_user_code(names: Iterable[str]) -> str | None:
    """Returns one SHA-256 for the code of all imported modules and files; None without code. For a package,
    all its files count.

    The hash does not depend on the folder in which the code is.
    """
    import hashlib

    digest = hashlib.sha256()
    code_files = list(chain.from_iterable(map(_list_code_files, names)))
    for file in code_files:
        digest.update(hashlib.sha256(read_file(file)).digest())
    return digest.hexdigest() if code_files else None


def _list_code_files(name: str) -> list[Path]:
    module = sys.modules.get(user_module(name))
    # If this process has not imported the name, it may be the path of a file.
    file = getattr(module, "__file__", name)
    if not isinstance(file, str) or not Path(file).is_file():
        return []
    return sorted(Path(file).parent.rglob("*.py")) if Path(file).name == "__init__.py" else [Path(file)]


_PACKAGE_FOLDERS = {"site-packages", "dist-packages"}
# A longer error is printed without its middle: only this many characters of its beginning and of its end.
_MAX_SHOWN_PART_LENGTH = 250


def own_words(error: BaseException) -> str:
    """Describes an error of a user's code in one line: its kind and text, and the last line of the user's files in its
    traceback. Files of installed packages do not count as the user's.
    """
    text = " ".join(str(error).split()).rstrip(".")
    if len(text) > 2 * _MAX_SHOWN_PART_LENGTH:
        text = f"{text[:_MAX_SHOWN_PART_LENGTH]} ... {text[-_MAX_SHOWN_PART_LENGTH:]}"
    error_class_name = "" if isinstance(error, Fp8benchError) else type(error).__name__
    description = ": ".join(part for part in (error_class_name, text) if part)
    # Paths of code that is not the user's: fp8bench, the standard library, and code without a file ('<string>').
    non_user_path_prefixes = (f"{Path(__file__).parents[1]}{os.sep}", f"{Path(os.__file__).parent}{os.sep}", "<")
    user_frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(non_user_path_prefixes)
        and not _PACKAGE_FOLDERS.intersection(Path(frame.filename).parts)
    ]
    return (
        f"{description} ({Path(user_frames[-1].filename).name}, line {user_frames[-1].lineno})"
        if user_frames
        else description
    )


def user_module(name: str) -> str:
    """Returns the name in sys.modules of a user's module or file. Files with equal names in different folders have
    different module names.
    """
    import hashlib

    if not name.endswith(".py"):
        return name
    path = Path(name).resolve()
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
    check_file(path)  # refuses pipes, devices and files that are too large
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # register the module before it runs, as Python's import does
    # While the file is imported, its folder comes first in sys.path, as for a script. Afterwards it comes last, so that
    # functions of the file can still import modules from it, without hiding other modules.
    folder = str(path.parent)
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]  # so that a second import runs the file again
        raise
    finally:
        sys.path.remove(folder)
        sys.path.append(folder)


def modules_under(folder: Path) -> tuple[str, ...]:
    """Returns the loaded modules whose files are below a folder. Leaves out fp8bench's modules and installed
    packages.
    """
    resolved_folder = folder.resolve()
    module_names = []
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or name.partition(".")[0] in ("fp8bench", "__main__"):
            continue
        # Some modules without a file, for example of torch, name a relative path that does not exist. Replace it by
        # Path(), which is in no folder.
        path = Path(file).resolve() if Path(file).is_absolute() else Path()
        if path.is_relative_to(resolved_folder) and not _PACKAGE_FOLDERS.intersection(path.parts):
            module_names.append(name)
    return tuple(module_names)
