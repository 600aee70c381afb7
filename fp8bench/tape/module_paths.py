"""Which module of a model an operator belongs to: in forward by the module that runs, in backward by its node.

Between a module's forward and its backward nothing says when its backward begins or ends: nodes of different modules
interleave there. So each node is known by itself: by a label that is left on it when the module which made it ends,
else by its number, which counts on while modules begin and end. Nothing is put into the program.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves

_task = torch._C._current_graph_task_id
_next_number = torch._C._autograd._get_sequence_nr
_node = torch._C._current_autograd_node
_FORWARD = -1  # the task outside of any backward pass
_LABEL = "fp8bench.module"
# Nodes that keep a parameter's gradient are made by none.
_OF_NO_MODULE = 2**64 - 1
OUTSIDE = ""


class _Made:
    """Numbers of the nodes that one task has made, in stretches, each by the module that ran."""

    def __init__(self, first: int) -> None:
        self.first = first
        self._ends: list[int] = []
        self._paths: list[str] = []

    def until(self, number: int, path: str) -> None:
        if number > (self._ends[-1] if self._ends else self.first):
            self._ends.append(number)
            self._paths.append(path)

    def path_of(self, number: int) -> str:
        place = bisect_right(self._ends, number)
        return self._paths[place] if place < len(self._ends) else OUTSIDE


@dataclasses.dataclass(slots=True, frozen=True)
class _Running:
    """A module whose forward runs: the task that it runs in, and the number of the first node that it may make."""

    path: str
    task: int
    first: int


class ModulePaths:
    """Knows where a step is while `watched` goes on. Models are named from `roots` on, others as they turn up.

    A path is that of `named_modules`; of a root itself the name of its class.
    """

    def __init__(self, roots: Iterable[nn.Module] = ()) -> None:
        self._names: dict[nn.Module, str] = {}
        for root in roots:
            self._name(root)
        self._running: list[_Running] = []
        self._made: dict[int, _Made] = {}
        # In which task the backward pass of a task was begun: a block that is computed again makes nodes in one.
        self._begun_in = {_FORWARD: _FORWARD}
        self._last_task = _FORWARD

    @contextmanager
    def watched(self) -> Iterator[None]:
        with ExitStack() as hooks:
            hooks.callback(register_module_forward_pre_hook(self._enter).remove)
            hooks.callback(register_module_forward_hook(self._leave, always_call=True).remove)
            try:
                yield
            finally:
                self._running.clear()

    def now(self) -> tuple[str, str, bool]:
        """The module that an operator runs for, the node of the backward pass that runs, and whether one does."""
        task = self._seen_task()
        if self._running and self._running[-1].task == task:
            return self._running[-1].path, "", task != _FORWARD
        if task == _FORWARD:
            return OUTSIDE, "", False
        node: Any = _node()
        return (OUTSIDE, "", True) if node is None else (self._path_of(node, task), node.name(), True)

    def _seen_task(self) -> int:
        task = _task()
        if task not in self._begun_in:
            self._begun_in[task] = self._last_task
        self._last_task = task
        return task

    def _path_of(self, node: Any, task: int) -> str:
        label = node.metadata.get(_LABEL)
        if label is not None:
            return str(label)
        number = node._sequence_nr()
        for maker in (self._begun_in[task], _FORWARD):
            made = self._made.get(maker)
            if made is not None and number >= made.first:
                return made.path_of(number)
        return OUTSIDE

    def _name(self, root: nn.Module) -> None:
        for name, module in root.named_modules():
            self._names.setdefault(module, name or type(module).__name__)

    def _enter(self, module: nn.Module, given: Any) -> None:
        if module not in self._names:
            self._name(module)
        task, number = self._seen_task(), _next_number()
        self._hand_over(task, number)
        self._running.append(_Running(self._names[module], task, number))

    def _leave(self, module: nn.Module, given: Any, result: Any) -> None:
        if not self._running:  # it was begun before anybody watched
            return
        task, number = self._seen_task(), _next_number()
        self._hand_over(task, number)
        left = self._running.pop()
        self._label(result, left)

    def _hand_over(self, task: int, number: int) -> None:
        """Nodes made until now belong to whoever has run until now."""
        made = self._made.get(task)
        if made is None:
            made = self._made[task] = _Made(number)
        running = self._running[-1] if self._running else None
        made.until(number, running.path if running is not None and running.task == task else OUTSIDE)

    def _label(self, result: Any, left: _Running) -> None:
        """Leave its module's name on each node that was made since a module began, as far as its result leads there."""
        waiting: list[Any] = [one.grad_fn for one in _tensors(result)]
        made, seen = self._made[left.task], set()
        while waiting:
            node = waiting.pop()
            if node is None or node in seen or node._sequence_nr() < left.first:
                continue
            seen.add(node)
            number = node._sequence_nr()
            node.metadata.setdefault(_LABEL, left.path if number == _OF_NO_MODULE else made.path_of(number))
            waiting += [further for further, _ in node.next_functions]


def _tensors(result: Any) -> Iterator[Tensor]:
    """Those of what a module gives: in collections and dataclasses; other objects are not looked into."""
    for leaf in tree_leaves(result):
        if isinstance(leaf, Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _tensors([getattr(leaf, one.name) for one in dataclasses.fields(leaf)])
