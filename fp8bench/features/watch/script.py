"""Runs a user's script as `python SCRIPT ARGS` does, and watches the steps of its optimizers. The script may set
environment variables before it imports torch, so this module does not import torch before the script does.
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
    from fp8bench.features.train.lab.script_loops import ScriptLoopWatch

# The module with the base class of all torch optimizers. `import torch` imports it.
_TORCH_OPTIMIZER_MODULE_NAME = "torch.optim.optimizer"


@dataclass(frozen=True)
class Script:
    """The script to run: its absolute path, and the path as the user has typed it. `stream` is the file for its first
    training loop, and `options` are those of `fp8bench.watch`. With several ranks, only one is a writer (`is_writer`):
    it writes and prints.
    """

    path: str
    path_as_typed: str
    arguments: tuple[str, ...]
    stream: Path
    store: Path
    options: Mapping[str, Any]
    is_writer: bool = True


def run_script(script: Script, say: Callable[[str], None]) -> NoReturn:
    """Runs the script in this process, then ends the process as Python would: with the script's exit code, traceback
    or signal."""
    script_watch = _ScriptWatch(script, say if script.is_writer else lambda _: None)
    received_end_signals: list[signal.Signals] = []
    # This handler is registered first, so that it runs after all exit handlers of the script.
    atexit.register(_end_by_signal, received_end_signals)
    script_watch.start()
    exit_code: Any = None
    try:
        _execute_script(script)
    except SystemExit as end:
        exit_code = end.code
    except BaseException as error:  # noqa: BLE001 - printed as Python does
        script_traceback = _skip_outer_frames(error.__traceback__, script.path)
        sys.excepthook(type(error), error.with_traceback(script_traceback), script_traceback)
        exit_code = 1
        if isinstance(error, KeyboardInterrupt):
            received_end_signals.append(signal.SIGINT)
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        script_watch.end()
    sys.exit(exit_code)


def _execute_script(script: Script) -> None:
    # 1. Make the module that is the script's `__main__`. Spawned workers import it by its path.
    main_module = ModuleType("__main__")
    vars(main_module).update(__file__=script.path, __cached__=None, __builtins__=builtins)
    sys.modules["__main__"] = main_module
    # 2. Set what Python sets: the arguments, and the script's folder in place of fp8bench's on the path.
    sys.argv = [script.path_as_typed, *script.arguments]
    # With `-P` Python puts no folder of the script on the path.
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(script.path).resolve().parent)
    # 3. Run the script.
    with io.open_code(script.path) as file:
        # Without dont_inherit, the script would inherit this file's `from __future__ import annotations`.
        compiled_script = compile(file.read(), script.path, "exec", dont_inherit=True)
    exec(compiled_script, vars(main_module))


def _skip_outer_frames(traceback: TracebackType | None, path: str) -> TracebackType | None:
    """Returns the traceback without the frames outside the script."""
    while traceback is not None and traceback.tb_frame.f_code.co_filename != path:
        traceback = traceback.tb_next
    return traceback


def _end_by_signal(signals: list[signal.Signals]) -> None:
    """Ends this process by the signal that ended the script, so that the parent process sees the signal."""
    for signal_number in signals:
        # The signal ends the process without flushing.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        signal.signal(signal_number, signal.SIG_DFL)
        os.kill(os.getpid(), signal_number)


class _ScriptWatch:
    """Waits until the script imports torch, then watches the steps of its optimizers. An error ends the watching, not
    the script."""

    def __init__(self, script: Script, say: Callable[[str], None]) -> None:
        self._script, self._say = script, say
        self._own_pid = os.getpid()
        self._loops: ScriptLoopWatch | None = None
        self._has_failed = self._has_ended = False

    def start(self) -> None:
        if _TORCH_OPTIMIZER_MODULE_NAME in sys.modules:
            self._add_hook(sys.modules[_TORCH_OPTIMIZER_MODULE_NAME])
        else:
            sys.meta_path.insert(0, _ImportHook(_TORCH_OPTIMIZER_MODULE_NAME, self._add_hook))
        # By default, SIGTERM would end the process without the last rows.
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._handle_sigterm)

    def end(self) -> None:
        """Writes the remaining rows, and reports the watched training loops."""
        if self._has_ended:
            return
        self._has_ended = True
        with self._stop_on_error():
            if self._loops is not None:
                self._loops.close()
                self._loops.report()
            elif not self._has_failed:
                self._say(self._explain_no_steps())

    def _explain_no_steps(self) -> str:
        remedy = "Put its loop into `with fp8bench.watch(model, optimizer):`"
        if "torch" not in sys.modules:
            return (
                "nothing was watched: this process did not import torch. If the script starts other "
                "processes that train, "
                "run `fp8bench watch` on their scripts"
            )
        return f"nothing was watched: no optimizer of torch.optim has taken a step in this process. {remedy}"

    def _add_hook(self, module: ModuleType) -> None:
        module.register_optimizer_step_pre_hook(self._record_step)

    def _record_step(self, optimizer: Any, *_: Any) -> None:
        # Forked processes inherit the hook; only the original process records.
        if self._has_failed or self._has_ended or os.getpid() != self._own_pid:
            return
        with self._stop_on_error():
            if self._loops is None:
                script = self._script
                from fp8bench.features.train.lab.script_loops import ScriptLoopWatch

                self._loops = ScriptLoopWatch(script.stream, script.store, script.options, self._say)
            self._loops.watch_optimizer(optimizer)

    @contextlib.contextmanager
    def _stop_on_error(self) -> Any:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is, the training goes on
            self._has_failed = True
            self._say(
                "watching stopped because of an error, and the script continues: "
                f"{type(error).__name__}: {error!s:.300}"
            )

    def _handle_sigterm(self, number: int, frame: FrameType | None) -> None:
        """Writes the remaining rows after SIGTERM, then lets the signal end the process as usual."""
        if os.getpid() == self._own_pid and self._loops is not None:
            with contextlib.suppress(Exception):
                self._loops.close()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


class _ImportHook(MetaPathFinder):
    """Calls a function once, after the module `name` was imported."""

    def __init__(self, name: str, call: Callable[[ModuleType], None]) -> None:
        self._name, self._call = name, call

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        # find_spec below would call this hook again.
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            run_module = spec.loader.exec_module

            def run_and_call(module: ModuleType) -> None:
                run_module(module)
                self._call(module)

            spec.loader.exec_module = run_and_call  # type: ignore[method-assign]
        return spec
