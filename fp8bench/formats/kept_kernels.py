"""A CPU's compiled kernels, loaded again without torch's compiler, whose import takes seconds.

Torch compiles a kernel into libraries of C++ and a Python function that calls them. Their paths, and that function's
text, are stored in a file next to them, named by everything that determines their results. A file that has changed, or
that another user could have written, is ignored, and the kernel is compiled again.
"""

from __future__ import annotations

import contextlib
import grp
import hashlib
import importlib.machinery
import importlib.util
import inspect
import json
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
from fp8bench.files import compact, seal, unseal, write_whole
from fp8bench.formats import vector_width

Call = Callable[..., object]
# Where a library finds the function that returns a tensor's address; torch sets it as well.
_ADDRESSES = "TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"
# Prefix of torch's options, and those that do not change a kernel.
_OPTIONS, _NO_OPTIONS = "TORCHINDUCTOR_", ("TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS")


def read(kernel: object) -> tuple[Call, int] | None:
    """Returns a stored kernel and the bits of its vectors; None if it is missing or was changed."""
    path = _file_of(kernel)
    try:
        stored = unseal(json.loads(_read_own(path))) if path is not None else None
        return None if stored is None else (_call_of(stored), int(stored["bits"]))
    except Exception:  # noqa: BLE001 - whatever is wrong with it, the compiler makes it anew
        return None


def keep(kernel: Any, run: Call, bits: int, modules: Sequence[ModuleType]) -> None:
    """Keeps a kernel of which torch has made these modules, if it can be called without torch's compiler and then
    writes the same bits. Where nothing can be written, the next process compiles again."""
    path = _file_of(kernel)
    if path is None or len(modules) != 1:
        return
    try:
        stored = {**_parts_of(modules[0]), "bits": bits, "kernel": str(kernel)}
        if _writes_alike(run, _call_of(stored), kernel.examples()):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.parent.chmod(0o700)
            write_whole(path, compact(seal(stored)), sync=False)
            path.chmod(0o600)  # whatever the umask: see _read_own
    except (OSError, StoreError, LookupError, TypeError, AttributeError, SyntaxError, RuntimeError):
        return


@contextlib.contextmanager
def modules_made() -> Iterator[list[ModuleType]]:
    from torch._inductor.codecache import PyCodeCache

    first, modules = len(PyCodeCache.modules), list[ModuleType]()
    yield modules
    modules.extend(PyCodeCache.modules[first:])


def _parts_of(module: ModuleType) -> dict[str, Any]:
    """The text of the function that calls libraries, these with their digests, and the helpers of torch that it calls.

    Raises LookupError where it needs anything else.
    """
    call = module.Runner.call
    libraries, helpers = {}, []
    # Whatever the wrapper calls is torch's own guard, or a function of a library that was compiled for it.
    for name in ({*call.__code__.co_names} & {*vars(module)}) - {"torch"}:
        value = getattr(module, name)
        if value is getattr(torch._C._dynamo.guards, name, getattr(torch._C._dynamo.guards, f"_{name}", None)):
            helpers.append(name)
        elif isinstance(value, BuiltinFunctionType) and (file := getattr(value.__self__, "__file__", None)):
            libraries[name] = [file, _digest(Path(file))]
        # Anything else could not be found again without torch's compiler.
        else:
            raise LookupError(name)
    text = textwrap.dedent(inspect.getsource(call))
    return {"call": text, "libraries": libraries, "helpers": sorted(helpers)}


def _call_of(stored: dict[str, Any]) -> Call:
    guards: Any = torch._C._dynamo.guards
    names: dict[str, Any] = {"torch": torch}
    # A library that was changed is a different kernel.
    for name, (file, digest) in stored["libraries"].items():
        if _digest(Path(file)) != digest:
            raise LookupError(file)
        names[name] = _library(file).kernel
    for name in stored["helpers"]:
        names[name] = getattr(guards, name, None) or getattr(guards, f"_{name}")
    # Only wrapper code that this user's own process wrote comes here: _read_own has checked who owns the file.
    exec(compile(stored["call"], "<kept kernel>", "exec"), names)
    call = names["call"]
    return lambda *arguments: call(None, [*arguments])


@cache
def _library(file: str) -> Any:
    loader = importlib.machinery.ExtensionFileLoader("kernel", file)
    spec = importlib.util.spec_from_loader("kernel", loader)
    assert spec is not None
    name, earlier = f"_{_ADDRESSES}", os.environ.get(f"_{_ADDRESSES}")
    # The library looks up the function that returns a tensor's address in the environment.
    os.environ[name] = str(getattr(torch._C._dynamo.guards, name.lower()))
    try:
        library = importlib.util.module_from_spec(spec)
        loader.exec_module(library)
        return library
    finally:
        os.environ.pop(name) if earlier is None else os.environ.update({name: earlier})


def _writes_alike(run: Call, reloaded: Call, examples: Sequence[Tensor]) -> bool:
    expected, written = list(map(torch.clone, examples)), list(map(torch.clone, examples))
    # The stored kernel counts only if it writes the same bits as the one that was just compiled.
    run(*expected)
    reloaded(*written)
    return all(
        torch.equal(tensor.view(torch.uint8), same.view(torch.uint8))
        for tensor, same in zip(map(_flat, expected), map(_flat, written), strict=True)
    )


def _flat(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1)


def _file_of(kernel: Any) -> Path | None:
    """None for a kernel of a GPU, and without a C++ compiler, where none can have been compiled."""
    if kernel.device != "cpu" or (compiler := shutil.which(os.environ.get("CXX", "g++"))) is None:
        return None
    # The compiler by size and time: its version costs a process to ask.
    about = Path(compiler).resolve().stat()
    options = sorted(f"{key}={value}" for key, value in os.environ.items() if key.startswith(_OPTIONS))
    parts = (
        str(kernel),
        *_surroundings(),
        compiler,
        str(about.st_size),
        str(about.st_mtime_ns),
        *(option for option in options if not option.startswith(_NO_OPTIONS)),
        *map(str, vector_width.widths("cpu")),
    )
    return _folder() / "fp8bench" / f"{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()}.kernel.json"


@cache
def _surroundings() -> tuple[str, ...]:
    """Everything else that determines a compiled kernel: torch, this Python, the processor, and our own sources."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    processor = vector_width._processor()
    python = str(sys.implementation.cache_tag)
    return torch.__version__, str(torch.version.git_version), python, processor, digest.hexdigest()


def _folder() -> Path:
    if folder := os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        return Path(folder).absolute()
    spec = importlib.machinery.PathFinder.find_spec("cache_dir_utils", [f"{torch.__path__[0]}/_inductor/runtime"])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return Path(module.default_cache_dir())


def _read_own(path: Path) -> bytes:
    """Reads a file that is executed, if nobody else can have written it or put it there. Raises OSError otherwise."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:  # noqa: PTH123 - opened once
        status = os.fstat(file.fileno())
        if status.st_uid != os.getuid() or _others_write(status):
            raise PermissionError(path)
        for folder in path.resolve().parents:
            status = folder.lstat()
            # In a sticky folder, as /tmp is, others may add files, but not replace ours.
            if status.st_uid not in (os.getuid(), 0) or (_others_write(status) and not status.st_mode & stat.S_ISVTX):
                raise PermissionError(folder)
        return file.read()


def _others_write(status: os.stat_result) -> bool:
    if status.st_mode & stat.S_IWGRP and not _is_private(status.st_gid):
        return True
    return bool(status.st_mode & stat.S_IWOTH)


def _is_private(group: int) -> bool:
    """Whether a group is this user's alone and has the user's name, as umask 002 supposes."""
    try:
        members, user = grp.getgrgid(group), pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return False
    return members.gr_name == user and {*members.gr_mem} <= {user}


def _digest(file: Path) -> str:
    return hashlib.sha256(_read_own(file)).hexdigest()
