"""Stores compiled CPU kernels and loads them without importing torch's compiler, which takes seconds.

A kernel here is a `Kernel` of compiling.py, which imports this module. torch compiles a kernel into C++ libraries and a
Python function that calls them. A file stores the paths of the libraries and the text of the function. Its name is a
digest of everything that determines the kernel. A file is ignored if it has changed or if another user could have
written it. The kernel is then compiled again.
"""

from __future__ import annotations

import contextlib
import grp
import hashlib
import importlib.machinery
import importlib.util
import inspect
import os
import pwd
import shutil
import stat
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import BuiltinFunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from fp8bench.errors import StoreError
from fp8bench.files import add_checksum, format_compact_json, parse_json, remove_checksum, write_whole
from fp8bench.formats import vector_width

Call = Callable[..., object]
# When a library is loaded, it reads the address of a function from this environment variable of torch. The function
# returns the address of a tensor. torch's guards have the function's address under the same name in lower case.
_ADDRESS_VARIABLE = "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"
# The prefix of torch's options in the environment, and the options that do not change a kernel.
_OPTION_PREFIX, _IGNORED_OPTIONS = "TORCHINDUCTOR_", ("TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS")


def load_kernel(kernel: Any) -> tuple[Call, int] | None:
    """Returns a stored kernel and its vector width in bits. Returns None if the kernel is missing or was changed."""
    path = _find_kernel_path(kernel)
    try:
        stored_kernel = remove_checksum(parse_json(_read_owned_file(path))) if path is not None else None
        return None if stored_kernel is None else (_load_stored_kernel(stored_kernel), int(stored_kernel["bits"]))
    except Exception:  # noqa: BLE001 - whatever is wrong, the kernel is compiled again
        return None


def store_kernel(kernel: Any, run: Call, vector_bits: int, modules: Sequence[ModuleType]) -> None:
    """Stores a kernel for which torch has generated these modules, with its vector width `vector_bits`. Stores it only
    if the stored kernel, loaded without torch's compiler, writes exactly the same output as `run`. If the folder cannot
    be written to, the next process compiles again.
    """
    path = _find_kernel_path(kernel)
    if path is None or len(modules) != 1:
        return
    try:
        stored_kernel = {**_describe_module(modules[0]), "bits": vector_bits, "kernel": str(kernel)}
        if _writes_same_output(run, _load_stored_kernel(stored_kernel), kernel.examples()):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.parent.chmod(0o700)
            write_whole(path, format_compact_json(add_checksum(stored_kernel)), sync=False)
            path.chmod(0o600)  # set the mode whatever the umask is, because _read_owned_file checks it
    except (OSError, StoreError, LookupError, TypeError, AttributeError, SyntaxError, RuntimeError):
        return


@contextlib.contextmanager
def collect_modules() -> Iterator[list[ModuleType]]:
    """Yields a list. The modules that torch generates in the body of the `with` statement are added to it at the
    end.
    """
    from torch._inductor.codecache import PyCodeCache

    first_module, modules = len(PyCodeCache.modules), list[ModuleType]()
    yield modules
    modules.extend(PyCodeCache.modules[first_module:])


def _describe_module(module: ModuleType) -> dict[str, Any]:
    """Returns a description of a generated module: the text of the function that calls the libraries, the libraries
    with their digests, and the helpers of torch that the function calls.

    Raises LookupError if the function needs anything else.
    """
    call = module.Runner.call
    libraries, helpers = {}, []
    # The function may call torch's guards and functions of the libraries that were compiled for it.
    for name in ({*call.__code__.co_names} & {*vars(module)}) - {"torch"}:
        value = getattr(module, name)
        if value is _find_guard(name):
            helpers.append(name)
        elif isinstance(value, BuiltinFunctionType) and (file := getattr(value.__self__, "__file__", None)):
            libraries[name] = [file, _hash_file(Path(file))]
        # Any other object could not be loaded without torch's compiler.
        else:
            raise LookupError(name)
    return {"call": textwrap.dedent(inspect.getsource(call)), "libraries": libraries, "helpers": sorted(helpers)}


def _find_guard(name: str) -> Any:
    """Returns the function that torch's guards have under this name, or with an underscore before it; None without such
    a function.
    """
    guards: Any = torch._C._dynamo.guards
    return getattr(guards, name, None) or getattr(guards, f"_{name}", None)


def _load_stored_kernel(stored: dict[str, Any]) -> Call:
    """Returns a stored kernel as a function. Raises LookupError if one of its C++ libraries has changed, or if torch
    no longer has one of its helpers.
    """
    namespace: dict[str, Any] = {"torch": torch}
    # A changed library file has the code of a different kernel.
    for name, (file, digest) in stored["libraries"].items():
        if _hash_file(Path(file)) != digest:
            raise LookupError(file)
        namespace[name] = _load_library(file).kernel
    for name in stored["helpers"]:
        guard = _find_guard(name)
        if guard is None:
            raise LookupError(name)
        namespace[name] = guard
    # The text comes from torch in this process, or from a file that no other user could write (_read_owned_file).
    exec(compile(stored["call"], "<kept kernel>", "exec"), namespace)
    call = namespace["call"]
    return lambda *arguments: call(None, [*arguments])


@cache
def _load_library(file: str) -> Any:
    library_loader = importlib.machinery.ExtensionFileLoader("kernel", file)
    spec = importlib.util.spec_from_loader("kernel", library_loader)
    assert spec is not None
    previous_value = os.environ.get(_ADDRESS_VARIABLE)
    os.environ[_ADDRESS_VARIABLE] = str(getattr(torch._C._dynamo.guards, _ADDRESS_VARIABLE.lower()))
    try:
        library = importlib.util.module_from_spec(spec)
        library_loader.exec_module(library)
        return library
    finally:
        if previous_value is None:
            del os.environ[_ADDRESS_VARIABLE]
        else:
            os.environ[_ADDRESS_VARIABLE] = previous_value


def _writes_same_output(run: Call, reloaded: Call, examples: Sequence[Tensor]) -> bool:
    """Returns whether a kernel that was loaded again writes the same bits as the kernel that was just compiled."""
    expected_tensors, written_tensors = list(map(torch.clone, examples)), list(map(torch.clone, examples))
    run(*expected_tensors)
    reloaded(*written_tensors)
    return all(
        torch.equal(tensor.view(torch.uint8), written_tensor.view(torch.uint8))
        for tensor, written_tensor in zip(map(_flatten, expected_tensors), map(_flatten, written_tensors), strict=True)
    )


def _flatten(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1)


def _find_kernel_path(kernel: Any) -> Path | None:
    """Returns the path of a kernel's file. Returns None for a GPU kernel, or without a C++ compiler."""
    if kernel.device != "cpu" or (compiler := shutil.which(os.environ.get("CXX", "g++"))) is None:
        return None
    # The compiler's size and time identify it. To ask for its version would start a process.
    compiler_file_status = Path(compiler).resolve().stat()
    options = sorted(f"{key}={value}" for key, value in os.environ.items() if key.startswith(_OPTION_PREFIX))
    parts = (
        str(kernel),
        *_describe_environment(),
        compiler,
        str(compiler_file_status.st_size),
        str(compiler_file_status.st_mtime_ns),
        *(option for option in options if not option.startswith(_IGNORED_OPTIONS)),
        *map(str, vector_width.vector_widths("cpu")),
    )
    return _find_cache_folder() / "fp8bench" / f"{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()}.kernel.json"


@cache
def _describe_environment() -> tuple[str, ...]:
    """Returns what determines a compiled kernel besides its graph: torch, Python, the processor, and the sources of
    this package.
    """
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    processor = vector_width.describe_processor()
    python = str(sys.implementation.cache_tag)
    return torch.__version__, str(torch.version.git_version), python, processor, digest.hexdigest()


def _find_cache_folder() -> Path:
    if folder := os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        return Path(folder).absolute()
    # Load only this file: importing its package would import torch's compiler.
    spec = importlib.machinery.PathFinder.find_spec("cache_dir_utils", [f"{torch.__path__[0]}/_inductor/runtime"])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return Path(module.default_cache_dir())


def _read_owned_file(path: Path) -> bytes:
    """Reads a file whose content is executed. Raises OSError if another user could have written or placed it."""
    # Check the file that is open, not the path: another file could take its place after the check.
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:  # noqa: PTH123 - opened once
        status = os.fstat(file.fileno())
        if status.st_uid != os.getuid() or _can_others_write(status):
            raise PermissionError(path)
        for folder in path.resolve().parents:
            status = folder.lstat()
            # In a sticky folder such as /tmp, other users can add files but cannot replace ours.
            if status.st_uid not in (os.getuid(), 0) or (
                _can_others_write(status) and not status.st_mode & stat.S_ISVTX
            ):
                raise PermissionError(folder)
        return file.read()


def _can_others_write(status: os.stat_result) -> bool:
    """Returns whether another user can write to a file with this status."""
    if status.st_mode & stat.S_IWGRP and not _is_private_user_group(status.st_gid):
        return True
    return bool(status.st_mode & stat.S_IWOTH)


def _is_private_user_group(group: int) -> bool:
    """Returns whether a group has the user's name and no other member. Systems with umask 002 set up such groups."""
    try:
        group_entry, user_name = grp.getgrgid(group), pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return False
    return group_entry.gr_name == user_name and {*group_entry.gr_mem} <= {user_name}


def _hash_file(file: Path) -> str:
    return hashlib.sha256(_read_owned_file(file)).hexdigest()
