"""Figures of a loop without a reference: its handling of gradients and its optimizer between steps,
predictions and the gains of norms.

No tensor is read between watched steps.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from fp8bench.features.train.lab.low_precision import Parameters, Tensors
from fp8bench.features.train.lab.readings import Number
from fp8bench.features.train.values import GRADIENTS_LEFT, MOMENTS_GONE, OTHERS_TRAIN

# Inputs are compared by at most this many of their values.
_LOOKED_AT = 1 << 12
# With fewer examples, or fewer values per example, equal ones are expected.
_LEAST_COPIES = 8
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._BatchNorm)
_PLAIN = (Tensor, nn.Parameter)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return list(chain.from_iterable(group["params"] for group in optimizer.param_groups))


def local(tensor: Tensor) -> Tensor:
    """Returns the shard of a DTensor that is on this rank, or else the tensor."""
    # Asking a tensor for an attribute that it lacks is slow.
    return tensor if type(tensor) in _PLAIN or not hasattr(tensor, "to_local") else tensor.to_local()


def without_wrappers(module: nn.Module) -> tuple[nn.Module, str]:
    """Returns the module inside wrappers as of DDP and torch.compile, and the prefix of its parameters' paths."""
    prefix = ""
    while (names := [name for name, _ in module.named_children()]) in (["module"], ["_orig_mod"]):
        prefix += f"{names[0]}."
        module = getattr(module, names[0])
    return module, prefix


class Mark(NamedTuple):
    """A gradient with its version, and the version of its parameter. It keeps no gradient in memory; an `id` would be
    that of the next gradient, which often gets the same memory. A tensor has the same weak reference all its life."""

    gradient: weakref.ref[Tensor]
    version: int
    weight_version: int

    def is_untouched(self, parameter: Tensor) -> bool:
        gradient = parameter.grad
        return (
            gradient is not None and weakref.ref(gradient) is self.gradient and local(gradient)._version == self.version
        )


class LoopHabits:
    """Observes what a loop does with a module and its optimizer; `pop_mistakes` returns each new mistake once."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        # A script may drop its optimizer and make a new one: watching must not keep it in memory.
        self._optimizer_ref = weakref.ref(optimizer)
        self._own = {id(parameter) for parameter in module.parameters()}
        self._marks = self._mark_gradients()
        self._was_cleared = self._began = self._others_stepped = False
        self._states, self._age = 0, 0.0
        self._noticed: list[str] = []
        self._present: set[str] = set()

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        optimizer = self._optimizer_ref()
        assert optimizer is not None, "the optimizer is gone"
        return optimizer

    @contextmanager
    def listening(self) -> Iterator[None]:
        handle = register_optimizer_step_post_hook(self._see_any_step)
        try:
            yield
        finally:
            handle.remove()

    def figures(self, parameters: Parameters) -> dict[tuple[str, str], Tensor | float]:
        """Returns lower rates as shares of the highest, by name and layer."""
        # Groups of an optimizer may learn at different rates: health rules must know the slow ones.
        highest = self.rate()
        shares: dict[int, float] = {}
        for rate, group in self._groups():
            if highest > 0:
                shares |= dict.fromkeys(map(id, group["params"]), rate / highest)
        return {
            ("rate_share", name.removesuffix(".weight")): share
            for name, parameter in parameters.items()
            if (share := shares.get(id(parameter), 1.0)) < 1
        }

    @torch.no_grad()
    def backward_begins(self) -> None:
        """Detects gradients that were not cleared, and add up, because nothing has touched them since the last
        backward."""
        self._began = True
        if self._was_cleared:
            return
        # Usually the first gradient has been cleared, and no other is looked at.
        marked = self._marked()
        self._was_cleared = not marked or not all(mark.is_untouched(parameter) for parameter, mark in marked)

    def end_backward(self) -> bool:
        """Returns whether the backward has reached parameters of the optimizer."""
        reached = any(
            not mark.is_untouched(parameter) if mark is not None else parameter.grad is not None
            for parameter, mark in zip(parameters_of(self._optimizer), self._marks, strict=False)
        )
        self._marks, self._others_stepped = self._mark_gradients(), False
        return reached

    @torch.no_grad()
    def find_discarded_gradients(self) -> str:
        """Returns 'skipped' if the gradients of a backward were cleared, and neither an optimizer nor anything else
        has changed the weights since. 'used' if something has, '' if gradients remain or there was no backward."""
        marked = self._marked() if self._began else []
        if not marked or not all(self._is_cleared(parameter, mark) for parameter, mark in marked):
            return ""
        # Another optimizer's loss may pass through this module, as a GAN's does.
        changed = any(parameter._version != mark.weight_version for parameter, mark in marked)
        return "used" if self._others_stepped or changed else "skipped"

    def _marked(self) -> list[tuple[Tensor, Mark]]:
        pairs = zip(parameters_of(self._optimizer), self._marks, strict=False)
        return [(parameter, mark) for parameter, mark in pairs if mark is not None]

    @staticmethod
    def _is_cleared(parameter: Tensor, mark: Mark) -> bool:
        gradient = parameter.grad
        if gradient is None:
            return True
        # Untouched gradients need no look at their values, which would wait for the device.
        return not mark.is_untouched(parameter) and not bool(local(gradient).any())

    def forget_gradients(self) -> None:
        """Makes the next backward the first of a step."""
        self._marks, self._was_cleared, self._began = self._mark_gradients(), True, False

    def update_begins(self, moments_zeroed: bool = False) -> None:
        self._set(GRADIENTS_LEFT, self._began and not self._was_cleared)
        states, age = self._moments()
        self._set(MOMENTS_GONE, states < self._states or age < self._age or moments_zeroed)

    def rate(self) -> float:
        """Returns the highest rate of all groups; NaN for an optimizer without rates."""
        return max((rate for rate, _ in self._groups()), default=math.nan)

    def end_update(self) -> None:
        self._marks, self._was_cleared, self._began = self._mark_gradients(), False, False
        self._states, self._age = self._moments()

    def pop_mistakes(self) -> list[str]:
        noticed, self._noticed = self._noticed, []
        return noticed

    def _set(self, word: str, now: bool) -> None:
        if now and word not in self._present:
            self._noticed.append(word)
        (self._present.add if now else self._present.discard)(word)

    def _see_any_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        foreign = (id(parameter) not in self._own for parameter in parameters_of(optimizer))
        if optimizer is not self._optimizer_ref() and any(foreign):
            self._others_stepped = True
            self._set(OTHERS_TRAIN, True)

    def _groups(self) -> Iterator[tuple[float, dict[str, Any]]]:
        return ((float(group["lr"]), group) for group in self._optimizer.param_groups if group.get("lr") is not None)

    def _mark_gradients(self) -> list[Mark | None]:
        marks: list[Mark | None] = []
        # One loop without calls: it runs twice a step, for each parameter.
        for parameter in parameters_of(self._optimizer):
            gradient = parameter.grad
            if gradient is None:
                marks.append(None)
                continue
            # FSDP2 adds to the shard, which leaves the version of the whole unchanged.
            shard = gradient if type(gradient) is Tensor else local(gradient)
            marks.append(Mark(weakref.ref(gradient), shard._version, parameter._version))
        return marks

    def _moments(self) -> tuple[int, float]:
        """Returns for how many parameters the optimizer has a state, and its age in steps; 0 if it is on a GPU and
        would block."""
        state = self._optimizer.state
        age = next(iter(state.values())).get("step", 0) if state else 0
        waits = isinstance(age, Tensor) and age.device.type != "cpu"
        return len(state), 0.0 if waits else float(age)


# Receives the single number that a backward begins from, detached at its end; None if it begins from anything else.
Listener = Callable[[Tensor | None], None]
_listeners: list[tuple[Listener, Listener]] = []
_running: list[bool] = []
_plain_backward = torch.autograd.backward


@contextmanager
def listening(begins: Listener, ended: Listener) -> Iterator[None]:
    """Calls `begins` and `ended` around every backward except nested ones, as in checkpointing. All backward passes go
    through `torch.autograd.backward`, which is wrapped while there is a listener."""
    listener = begins, ended
    _listeners.append(listener)
    torch.autograd.backward = _backward  # type: ignore[assignment]
    try:
        yield
    finally:
        _listeners.remove(listener)
        if not _listeners and torch.autograd.backward is _backward:
            torch.autograd.backward = _plain_backward


def _backward(tensors: Tensor | Tensors, *args: Any, **named: Any) -> None:
    if _running:
        return _plain_backward(tensors, *args, **named)
    listeners, roots = tuple(_listeners), [tensors] if isinstance(tensors, Tensor) else list(tensors)
    # A loss is a single number; anything else is the backward of a part.
    root = roots[0] if len(roots) == 1 and roots[0].numel() == 1 else None
    for begins, _ in listeners:
        begins(root)
    # A nested backward, as in checkpointing, is not a step of the loop.
    _running.append(True)
    try:
        _plain_backward(tensors, *args, **named)
    finally:
        _running.pop()
    for _, ended in listeners:
        ended(None if root is None else root.detach().reshape(()))
    return None


@lru_cache(maxsize=8)
def _vector(shape: torch.Size, device: torch.device) -> Tensor:
    return torch.arange(shape.numel(), device=device).mul(2.399963).cos().reshape(shape)


def tensors_in(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from tensors_in(value)
    elif isinstance(output, tuple | list):
        for value in output:
            yield from tensors_in(value)


def fingerprint_of(inputs: Any) -> tuple[Tensor | None, int]:
    """Returns a number that is equal for equal inputs and differs for others, and the number of examples."""
    total: Tensor | None = None
    examples = 0
    for tensor in tensors_in(inputs):
        if not tensor.numel():
            continue
        # A sample of evenly spaced values is enough for moments, at the same cost for any batch.
        flat = tensor.detach().flatten()
        values = flat[:: -(-len(flat) // _LOOKED_AT)].to(torch.float64)
        number = (values * _vector(values.shape, values.device)).sum()
        if total is None:
            total, examples = number, len(tensor) if tensor.ndim else 1
        else:
            total = total + number.to(total.device)
    return total, examples


def data_figures(inputs: Any) -> dict[str, Number]:
    """Returns, for a sample of the first tensor given to a model: mean, deviation, and the share of duplicate
    examples."""
    several = (tensor.detach() for tensor in tensors_in(inputs) if tensor.numel() > 1 and tensor.dtype != torch.bool)
    tensor = next(several, None)
    if tensor is None or tensor.is_complex():
        return {}
    flat = tensor.flatten()
    values = flat[:: -(-len(flat) // _LOOKED_AT)].to(torch.float64)
    figures: dict[str, Number] = {"input_mean": values.mean(), "input_deviation": values.std()}
    rows = tensor.flatten(1) if tensor.ndim > 1 else tensor[:, None]
    if min(rows.shape) >= _LEAST_COPIES:
        values = rows[:, :: -(-rows.shape[1] // _LOOKED_AT)].to(torch.float64)
        fingerprints = (values * _vector(values.shape[1:], values.device)).sum(1).sort().values
        same = fingerprints[1:] == fingerprints[:-1]
        ends = torch.zeros_like(fingerprints[:1], dtype=torch.bool)
        figures["duplicates"] = (torch.cat([same, ends]) | torch.cat([ends, same])).to(torch.float64).mean()
    return figures


def gains_of(model: nn.Module) -> dict[str, Tensor]:
    gains = (
        (path, getattr(module, "weight", None))
        for path, module in model.named_modules()
        if isinstance(module, _NORMS) or "Norm" in type(module).__name__
    )
    return {path: gain for path, gain in gains if isinstance(gain, nn.Parameter) and gain.ndim == 1}


# A loss may be scaled and averaged in at most this many operations after its cross entropy.
_CHAIN = 8


def predictions_of(root: Tensor) -> dict[str, Number]:
    """Returns, for a cross entropy: classes, mean entropy and the largest range of logits. Empty for any other loss."""
    node: Any = root.grad_fn
    for _ in range(_CHAIN):
        if node is None or node.name().startswith("NllLoss"):
            break
        nexts = [function for function, _ in node.next_functions if function is not None]
        node = nexts[0] if len(nexts) == 1 else None
    scores: Any = node.next_functions[0][0] if node is not None else None
    if scores is None or not scores.name().startswith("LogSoftmax"):
        return {}
    dim = scores._saved_dim
    dim -= (dim > 1 << 63) << 64  # as unsigned
    with torch.no_grad():
        logs = scores._saved_result.to(torch.float32)
        spread = logs.amax(dim) - logs.amin(dim)
        entropy = -(logs.exp() * logs.clamp(min=-1e4)).sum(dim).mean()
        return {"classes": float(logs.shape[dim]), "entropy": entropy, "logit_range": spread.amax()}
