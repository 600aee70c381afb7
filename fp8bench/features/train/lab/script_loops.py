"""The loops of a script that was not written to be watched: finds what each optimizer trains at its first step."""

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
from fp8bench.features.train.api import complain_of, watch
from fp8bench.features.train.lab.loop_figures import parameters_of, without_wrappers
from fp8bench.features.train.lab.own_loop import OwnLoop
from fp8bench.features.train.values import Lines, StepRow
from fp8bench.jobs.report_files import Pages, report_of, short_path
from fp8bench.report.words.naming import many

Say = Callable[[str], None]


class ScriptLoops:
    """Watches each optimizer from its second step on, in a separate stream."""

    def __init__(self, stream: Path, store: Path, options: Mapping[str, Any], say: Say) -> None:
        """`stream` is the first loop's file; pages are written to the reports of `store`."""
        self._stream, self._store, self._options, self._say = stream, store, options, say
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._loops: list[_Watched] = []

    def see_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Begins to watch an optimizer that takes its first step."""
        if optimizer in self._optimizers:
            return
        self._optimizers.add(optimizer)
        parameters = set(map(id, parameters_of(optimizer)))
        for loop in self._loops:
            if not parameters <= loop.parameters:
                continue
            # An optimizer inside another one, as of ZeroRedundancyOptimizer, steps along with it.
            if loop.watched.is_updating:
                return
            # A new optimizer of the same parameters, as for a second phase, takes over.
            loop.stack.close()
        self._watch(optimizer)

    def close(self) -> None:
        """Writes the remaining rows of all loops."""
        for loop in self._loops:
            loop.stack.close()

    def report(self) -> None:
        """Says where the streams are, and the command that shows them."""
        for loop in self._loops[:_REPORTED]:
            path = short_path(loop.path)
            if loop.steps:
                shown = _write_page(loop.path, self._store) or f"fp8bench report {path}"
                self._say(f"{many(loop.steps, 'step')} of {loop.title}, watched from the second on: {shown}")
            else:
                self._say(f"no loss of {loop.title} was seen: {path} has no steps. {_LINE}")
        if len(self._loops) > _REPORTED:
            self._say(f"{len(self._loops) - _REPORTED} more streams are in {short_path(self._stream.parent)}")

    def _watch(self, optimizer: torch.optim.Optimizer) -> None:
        kind = type(optimizer).__name__
        if _uses_deepspeed(optimizer):
            words = "DeepSpeed keeps parameters in partitions that no module holds, so that they cannot be watched"
            self._say(f"{words}. Run the script with DDP or FSDP2 instead, to watch it")
            return
        module = find_module(optimizer)
        if module is None:
            count = many(len(parameters_of(optimizer)), "tensor")
            self._say(f"{kind} is not watched: no module of torch holds the {count} that it changes. {_LINE}")
            return
        number = len(self._loops) + 1
        path = self._stream if number == 1 else self._stream.with_name(f"{self._stream.stem}.{number}.jsonl")
        title = f"{type(without_wrappers(module)[0]).__name__} by {kind}"
        loop = _Watched(path, title, frozenset(map(id, parameters_of(optimizer))))
        watched = watch(
            module,
            optimizer,
            path,
            told=loop.see,
            name=self._stream.stem if number == 1 else f"{self._stream.stem}.{number}",
            scaler=find_scaler(optimizer),
            **self._options,
        )
        loop.watched = loop.stack.enter_context(watched)
        loop.watched.begin_in_step()
        self._loops.append(loop)
        self._say(f"watching {loop.title} from its second step on: {short_path(path)}")


# A script may train a model per fold, each with an optimizer.
_REPORTED = 4
_LINE = "Add a line before its loop, and indent the loop: with fp8bench.watch(model, optimizer):"


class _Watched:
    """A loop with its stream; `steps` is 1 more than the last step that has a row, `parameters` are identities."""

    watched: OwnLoop

    def __init__(self, path: Path, title: str, parameters: frozenset[int]) -> None:
        self.path, self.title, self.parameters, self.steps = path, title, parameters, 0
        self.stack = ExitStack()

    def see(self, lines: Lines) -> None:
        self.steps = max([self.steps, *(line.step + 1 for line in lines if isinstance(line, StepRow))])
        complain_of(lines)


def _write_page(stream: Path, store: Path) -> str:
    """Writes the stream's page, and returns its path; '' if it cannot be written."""
    with suppress(Fp8benchError):
        return short_path(report_of([str(stream)], store, Pages()))
    return ""


def find_module(optimizer: torch.optim.Optimizer) -> nn.Module | None:
    """Returns the outermost module that holds all parameters of an optimizer, without those of the other optimizers."""
    trained = set(map(id, parameters_of(optimizer)))
    modules: list[nn.Module] = _instances(nn.Module)
    others = set[int]()
    for other in _instances(torch.optim.Optimizer):
        # Wrappers of an optimizer have its parameters.
        with suppress(AttributeError):
            parameters = set(map(id, parameters_of(other)))
            others |= parameters - trained
    # 1. The smallest module that holds all.
    held = {module: set(map(id, module.parameters())) for module in modules}
    holders = [module for module, parameters in held.items() if parameters >= trained]
    if not holders:
        return None
    found = min(holders, key=lambda module: sum(1 for _ in module.modules()))
    # 2. Its parents, unless they hold parameters of other optimizers. A list of layers is never called.
    while parents := [module for module in holders if any(child is found for child in module.children())]:
        parent = min(parents, key=lambda module: len(held[module]))
        is_called = type(found).forward is not nn.Module.forward
        if is_called and (held[parent] & others or _is_lightning(parent)):
            break
        found = parent
    return found


def find_scaler(optimizer: torch.optim.Optimizer) -> Any:
    """Returns the GradScaler whose step calls the optimizer's, or None."""
    scalers = _instances(torch.amp.GradScaler)
    return next((scaler for scaler in scalers if id(optimizer) in scaler._per_optimizer_states), None)


def _instances(kind: type) -> list[Any]:
    # isinstance would ask lazy modules and weak proxies for their class.
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), kind)]
    return list({id(thing): thing for thing in found}.values())


def _is_lightning(module: nn.Module) -> bool:
    """Whether it is a LightningModule, whose forward is mostly not called in a training."""
    return any(base.__name__ == "LightningModule" for base in type(module).__mro__)


def _uses_deepspeed(optimizer: torch.optim.Optimizer) -> bool:
    if "deepspeed" not in sys.modules:
        return False
    things: Iterable[Any] = [optimizer, *_instances(nn.Module)]
    return any(type(thing).__module__.partition(".")[0] == "deepspeed" for thing in things)
