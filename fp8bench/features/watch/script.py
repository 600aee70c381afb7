"""Runs a user's script as `python SCRIPT ARGS` does, with a hook on the first step of each optimizer.

torch is not imported here before the script imports it, because the script may set environment variables first.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import importlib.util
import io
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FrameType, ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from fp8bench.features.train.lab.script_loops import ScriptLoops

# Every torch optimizer is a class of this module, which `import torch` imports.
_OPTIMIZERS = "torch.optim.optimizer"


@dataclass(frozen=True)
class Script:
    """A script to run: its absolute path, and the path as it was `typed`. `stream` is the file of its first loop,
    `options` are those of `fp8bench.watch`; of several ranks only the one that `writes` prints and writes."""

    path: str
    typed: str
    arguments: tuple[str, ...]
    stream: Path
    store: Path
    options: Mapping[str, Any]
    writes: bool = True


def run_script(script: Script, say: Callable[[str], None]) -> NoReturn:
    """Runs the script in this process, and ends the process as Python would: with the script's exit code, traceback or
    signal."""
    watching = _Watching(script, say if script.writes else lambda _: None)
    ended_by: list[signal.Signals] = []
    # Registered first, so that it runs after whatever the script registers.
    atexit.register(_die, ended_by)
    watching.begin()
    code: Any = None
    try:
        _execute(script)
    except SystemExit as end:
        code = end.code
    except BaseException as error:  # noqa: BLE001 - printed as Python does
        tail = _tail_of(error.__traceback__, script.path)
        sys.excepthook(type(error), error.with_traceback(tail), tail)
        code = 1
        if isinstance(error, KeyboardInterrupt):
            ended_by.append(signal.SIGINT)
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        watching.end()
    sys.exit(code)


def _execute(script: Script) -> None:
    # 1. Make the module that the script sees as `__main__`, and that spawned workers import by its path.
    main = ModuleType("__main__")
    vars(main).update(__file__=script.path, __cached__=None, __builtins__=builtins)
    sys.modules["__main__"] = main
    # 2. Set what Python sets: arguments, and the script's folder in place of ours on the path.
    sys.argv = [script.typed, *script.arguments]
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(script.path).resolve().parent)
    # 3. Run it.
    with io.open_code(script.path) as file:
        code = compile(file.read(), script.path, "exec", dont_inherit=True)
    exec(code, vars(main))


def _tail_of(traceback: TracebackType | None, path: str) -> TracebackType | None:
    """Returns the traceback from the script's first line on."""
    while traceback is not None and traceback.tb_frame.f_code.co_filename != path:
        traceback = traceback.tb_next
    return traceback


def _die(signals: list[signal.Signals]) -> None:
    """Ends this process by the signal that has ended the script, so that its parent sees the signal."""
    for number in signals:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


class _Watching:
    """Waits for torch, then for steps of optimizers. A fault ends watching and not the script."""

    def __init__(self, script: Script, say: Callable[[str], None]) -> None:
        self._script, self._say = script, say
        self._own_pid = os.getpid()
        self._loops: ScriptLoops | None = None
        self._has_failed = self._has_ended = False

    def begin(self) -> None:
        if _OPTIMIZERS in sys.modules:
            self._add_hook(sys.modules[_OPTIMIZERS])
        else:
            sys.meta_path.insert(0, _AfterImport(_OPTIMIZERS, self._add_hook))
        # By default SIGTERM would end the process without the last rows.
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._terminate)

    def end(self) -> None:
        """Writes the remaining rows, and reports the watched loops."""
        if self._has_ended:
            return
        self._has_ended = True
        with self._survive():
            if self._loops is not None:
                self._loops.close()
                self._loops.report()
            elif not self._has_failed:
                self._say(self._why_nothing())

    def _why_nothing(self) -> str:
        way = "Put its loop into `with fp8bench.watch(model, optimizer):`"
        if "torch" not in sys.modules:
            return (
                "nothing was watched: this process did not import torch. If the script starts others that train, "
                "run `fp8bench watch` on what they run"
            )
        return f"nothing was watched: no optimizer of torch.optim has taken a step in this process. {way}"

    def _add_hook(self, module: ModuleType) -> None:
        module.register_optimizer_step_pre_hook(self._see_step)

    def _see_step(self, optimizer: Any, *_: Any) -> None:
        # Forks inherit the hook.
        if self._has_failed or self._has_ended or os.getpid() != self._own_pid:
            return
        with self._survive():
            if self._loops is None:
                script = self._script
                from fp8bench.features.train.lab.script_loops import ScriptLoops

                self._loops = ScriptLoops(script.stream, script.store, script.options, self._say)
            self._loops.see_step(optimizer)

    @contextlib.contextmanager
    def _survive(self) -> Any:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is, the training goes on
            self._has_failed = True
            self._say(f"watching ends here, and the script goes on: {type(error).__name__}: {error!s:.300}")

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        """Writes the remaining rows, then lets the signal end the process as without a handler."""
        if os.getpid() == self._own_pid and self._loops is not None:
            with contextlib.suppress(Exception):
                self._loops.close()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


class _AfterImport(MetaPathFinder):
    """Calls a function once a module has been imported."""

    def __init__(self, name: str, call: Callable[[ModuleType], None]) -> None:
        self._name, self._call = name, call

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_call(module: ModuleType) -> None:
                execute(module)
                self._call(module)

            spec.loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec
