"""Which module of a model an operator belongs to: in forward by the module that runs, in backward by its node.

Between a module's forward and its backward nothing says when its backward begins or ends: nodes of different modules
interleave there. So each node is known by itself: by a label that is left on it when the module which made it ends,
else by its number, which counts on while modules begin and end. Nothing is put into the program.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Generic, TypeVar

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
# What a module is known by.
L = TypeVar("L")


class _Made(Generic[L]):
    """Numbers of the nodes that one task has made, in stretches, each by the module that ran."""

    def __init__(self, first: int, outside: L) -> None:
        self.first, self._outside = first, outside
        self._ends: list[int] = []
        self._makers: list[L] = []

    def until(self, number: int, maker: L) -> None:
        if number > (self._ends[-1] if self._ends else self.first):
            self._ends.append(number)
            self._makers.append(maker)

    def maker_of(self, number: int) -> L:
        place = bisect_right(self._ends, number)
        return self._makers[place] if place < len(self._ends) else self._outside


@dataclasses.dataclass(slots=True, frozen=True)
class _Running(Generic[L]):
    """A module whose forward runs: the task that it runs in, and the number of the first node that it may make."""

    label: L
    task: int
    first: int


class RunningModules(Generic[L]):
    """Knows where a step is while `watched` goes on, by the labels of modules; one without a label is passed by."""

    def __init__(self, label_of: Callable[[nn.Module], L | None], outside: L) -> None:
        self._label_of, self._outside = label_of, outside
        self._running: list[_Running[L]] = []
        self._made: dict[int, _Made[L]] = {}
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

    def now(self) -> tuple[L, Any, bool]:
        """What an operator runs for, the node of the backward pass that runs if any does outside of a module that is
        computed again, and whether one does."""
        task = self._seen_task()
        if self._running and self._running[-1].task == task:
            return self._running[-1].label, None, task != _FORWARD
        node: Any = None if task == _FORWARD else _node()
        return self._outside if node is None else self._maker_of(node, task), node, task != _FORWARD

    def go_in(self, label: L) -> None:
        """What runs from here on runs for that, until it goes out."""
        task, number = self._hand_over()
        self._running.append(_Running(label, task, number))

    def go_out(self) -> _Running[L]:
        self._hand_over()
        return self._running.pop()

    def _seen_task(self) -> int:
        task = _task()
        if task not in self._begun_in:
            self._begun_in[task] = self._last_task
        self._last_task = task
        return task

    def _maker_of(self, node: Any, task: int) -> L:
        if _LABEL in node.metadata:
            label: L = node.metadata[_LABEL]
            return label
        number = node._sequence_nr()
        for maker in (self._begun_in[task], _FORWARD):
            made = self._made.get(maker)
            if made is not None and number >= made.first:
                return made.maker_of(number)
        return self._outside

    def _enter(self, module: nn.Module, given: Any) -> None:
        label = self._label_of(module)
        if label is not None:
            self.go_in(label)

    def _leave(self, module: nn.Module, given: Any, result: Any) -> None:
        if self._running and self._label_of(module) is not None:  # else it was begun before anybody watched
            self._label(result, self.go_out())

    def _hand_over(self) -> tuple[int, int]:
        """Nodes made until now belong to whoever has run until now; the task, and the number of the next node."""
        task, number = self._seen_task(), _next_number()
        made = self._made.get(task)
        if made is None:
            made = self._made[task] = _Made(number, self._outside)
        running = self._running[-1] if self._running else None
        made.until(number, running.label if running is not None and running.task == task else self._outside)
        return task, number

    def _label(self, result: Any, left: _Running[L]) -> None:
        """Leave its module's label on each node that was made since it began, as far as its result leads there."""
        waiting: list[Any] = [tensor.grad_fn for tensor in _tensors(result)]
        made, seen = self._made[left.task], set()
        while waiting:
            node = waiting.pop()
            if node is None or node in seen or node._sequence_nr() < left.first:
                continue
            seen.add(node)
            number = node._sequence_nr()
            node.metadata.setdefault(_LABEL, left.label if number == _OF_NO_MODULE else made.maker_of(number))
            waiting += [further for further, _ in node.next_functions]


class ModulePaths(RunningModules[str]):
    """By their paths. Models are named from `roots` on, others as they turn up.

    A path is that of `named_modules`; of a root itself the name of its class.
    """

    def __init__(self, roots: Iterable[nn.Module] = ()) -> None:
        self._names: dict[nn.Module, str] = {}
        for root in roots:
            self._name(root)
        super().__init__(self._path_of, OUTSIDE)

    def _path_of(self, module: nn.Module) -> str:
        if module not in self._names:
            self._name(module)
        return self._names[module]

    def _name(self, root: nn.Module) -> None:
        for name, module in root.named_modules():
            self._names.setdefault(module, name or type(module).__name__)


def _tensors(result: Any) -> Iterator[Tensor]:
    """Those of what a module gives: in collections and dataclasses; other objects are not looked into."""
    for leaf in tree_leaves(result):
        if isinstance(leaf, Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _tensors([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
