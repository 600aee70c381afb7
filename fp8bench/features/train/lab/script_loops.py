"""Watches the loops of a script that does not call fp8bench. When an optimizer takes its first step, this module
finds the model that the optimizer trains.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fp8bench.errors import Fp8benchError
from fp8bench.features.train.api import print_events, watch
from fp8bench.features.train.lab.loop_figures import list_parameters, unwrap_module
from fp8bench.features.train.lab.own_loop import UserLoopRecorder
from fp8bench.features.train.values import Lines, StepRow
from fp8bench.jobs.report_files import ReportDestinations, short_path, write_named_report
from fp8bench.report.words.naming import many

PrintLine = Callable[[str], None]


class ScriptLoopWatch:
    """Watches each optimizer of a script from its second step on. Each optimizer has a separate stream."""

    def __init__(self, stream: Path, store: Path, options: Mapping[str, Any], print_line: PrintLine) -> None:
        """`stream` is the file of the first loop. Pages are written into the folder of reports in `store`."""
        self._stream, self._store, self._options, self._print_line = stream, store, options, print_line
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._loops: list[_WatchedLoop] = []

    def watch_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Begins to watch an optimizer when it takes its first step."""
        if optimizer in self._optimizers:
            return
        self._optimizers.add(optimizer)
        parameter_ids = set(map(id, list_parameters(optimizer)))
        for loop in self._loops:
            if not parameter_ids <= loop.parameters:
                continue
            # An optimizer inside a watched one, as in ZeroRedundancyOptimizer, steps while the watched one is in its
            # step. It is not watched itself.
            if loop.own_loop.is_updating_parameters:
                return
            # A new optimizer of the same parameters replaces their old optimizer, as in a second phase of training.
            loop.stack.close()
        self._begin_watching_loop(optimizer)

    def close(self) -> None:
        """Writes the remaining rows of all loops."""
        for loop in self._loops:
            loop.stack.close()

    def report(self) -> None:
        """Prints where the page of each stream is, or the command that writes a page that could not be written."""
        for loop in self._loops[:_MAX_REPORTED_LOOPS]:
            path = short_path(loop.path)
            if loop.steps:
                page_or_command = _write_page(loop.path, self._store) or f"fp8bench report {path}"
                self._print_line(
                    f"{many(loop.steps, 'step')} of {loop.title}, watched from the second on: {page_or_command}"
                )
            else:
                self._print_line(f"no loss of {loop.title} was seen: {path} has no steps. {_WATCH_ADVICE}")
        if len(self._loops) > _MAX_REPORTED_LOOPS:
            self._print_line(
                f"{len(self._loops) - _MAX_REPORTED_LOOPS} more streams are in {short_path(self._stream.parent)}"
            )

    def _begin_watching_loop(self, optimizer: torch.optim.Optimizer) -> None:
        # 1. Find the module that the optimizer trains. Some optimizers have none.
        kind = type(optimizer).__name__
        if _uses_deepspeed(optimizer):
            reason = "DeepSpeed keeps parameters in partitions that no module holds, so that they cannot be watched"
            self._print_line(f"{reason}. Run the script with DDP or FSDP2 instead, to watch it")
            return
        module = find_module(optimizer)
        if module is None:
            tensor_words = many(len(list_parameters(optimizer)), "tensor")
            self._print_line(
                f"{kind} is not watched: no module of torch holds the {tensor_words} that it changes. {_WATCH_ADVICE}"
            )
            return
        # 2. Choose the files. The first loop has the requested names, and each further loop adds its number.
        loop_number = len(self._loops) + 1
        path, live_page_path = self._stream, self._options.get("live")
        if loop_number > 1:
            path = path.with_name(f"{path.stem}.{loop_number}.jsonl")
            live_page_path = live_page_path and live_page_path.with_name(
                f"{live_page_path.stem}.{loop_number}{live_page_path.suffix}"
            )
        # 3. Begin to watch. The optimizer is in its first step now.
        unwrapped_module, _ = unwrap_module(module)
        title = f"{type(unwrapped_module).__name__} by {kind}"
        watched_training_loop = _WatchedLoop(path, title, frozenset(map(id, list_parameters(optimizer))))
        watch_context = watch(
            module,
            optimizer,
            path,
            told=watched_training_loop.observe_lines,  # called with new lines of the stream
            name=path.stem,
            scaler=find_scaler(optimizer),
            **{**self._options, "live": live_page_path},
        )
        watched_training_loop.own_loop = watched_training_loop.stack.enter_context(watch_context)
        watched_training_loop.own_loop.begin_watch_in_step()
        self._loops.append(watched_training_loop)
        self._print_line(f"watching {watched_training_loop.title} from its second step on: {short_path(path)}")


# A script may train many models, such as one per fold. At most this many are reported.
_MAX_REPORTED_LOOPS = 4
_WATCH_ADVICE = "Add a line before its loop, and indent the loop: with fp8bench.watch(model, optimizer):"


class _WatchedLoop:
    """A watched loop with its stream. `steps` is the number of steps up to the last one that has a row. `parameters`
    are the ids of the parameters that the loop trains.
    """

    own_loop: UserLoopRecorder

    def __init__(self, path: Path, title: str, parameters: frozenset[int]) -> None:
        self.path, self.title, self.parameters, self.steps = path, title, parameters, 0
        self.stack = ExitStack()

    def observe_lines(self, lines: Lines) -> None:
        self.steps = max([self.steps, *(line.step + 1 for line in lines if isinstance(line, StepRow))])
        print_events(lines)


def _write_page(stream: Path, store: Path) -> str:
    """Writes a stream's page and returns its path; '' if it cannot be written."""
    with suppress(Fp8benchError):
        return short_path(write_named_report([str(stream)], store, ReportDestinations()))
    return ""


def find_module(optimizer: torch.optim.Optimizer) -> nn.Module | None:
    """Returns the outermost module that holds all parameters of an optimizer, but no parameters of other optimizers."""
    optimized_parameter_ids = set(map(id, list_parameters(optimizer)))
    all_modules: list[nn.Module] = _list_live_instances(nn.Module)
    other_parameter_ids = set[int]()
    for other_optimizer in _list_live_instances(torch.optim.Optimizer):
        # An optimizer whose `__init__` has not finished may have no `param_groups` yet.
        with suppress(AttributeError):
            parameter_ids = set(map(id, list_parameters(other_optimizer)))
            # This optimizer is in the list too, and wrappers of it have the same parameters, so subtract these.
            other_parameter_ids |= parameter_ids - optimized_parameter_ids
    # 1. Find the smallest module that holds all parameters.
    parameter_ids_by_module = {module: set(map(id, module.parameters())) for module in all_modules}
    holders = [
        module for module, parameter_ids in parameter_ids_by_module.items() if parameter_ids >= optimized_parameter_ids
    ]
    if not holders:
        return None
    trained_module = min(holders, key=lambda module: sum(1 for _ in module.modules()))
    # 2. Move up from parent to parent. Stop below a parent that holds parameters of other optimizers, and below a
    # LightningModule. But do not stop at a list of layers, because lists are never called.
    while parents := [module for module in holders if any(child is trained_module for child in module.children())]:
        parent = min(parents, key=lambda module: len(parameter_ids_by_module[module]))
        defines_forward = type(trained_module).forward is not nn.Module.forward
        holds_other_parameters = bool(parameter_ids_by_module[parent] & other_parameter_ids)
        if defines_forward and (holds_other_parameters or _is_lightning_module(parent)):
            break
        trained_module = parent
    return trained_module


def find_scaler(optimizer: torch.optim.Optimizer) -> Any:
    """Returns the GradScaler whose step calls this optimizer's step, or None."""
    grad_scalers = _list_live_instances(torch.amp.GradScaler)
    return next((scaler for scaler in grad_scalers if id(optimizer) in scaler._per_optimizer_states), None)


def _list_live_instances(kind: type) -> list[Any]:
    # isinstance would read `__class__` of lazy modules and weak proxies, which runs code of theirs.
    live_instances = [instance for instance in gc.get_objects() if issubclass(type(instance), kind)]
    return list({id(instance): instance for instance in live_instances}.values())


def _is_lightning_module(module: nn.Module) -> bool:
    """Returns whether a module is a LightningModule. A training rarely calls the forward of such a module."""
    return any(base.__name__ == "LightningModule" for base in type(module).__mro__)


def _uses_deepspeed(optimizer: torch.optim.Optimizer) -> bool:
    if "deepspeed" not in sys.modules:
        return False
    candidate_objects: Iterable[Any] = [optimizer, *_list_live_instances(nn.Module)]
    return any(type(instance).__module__.partition(".")[0] == "deepspeed" for instance in candidate_objects)
