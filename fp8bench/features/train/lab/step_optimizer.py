"""StepOptimizer updates an arm's weights by optimizers of torch: listed ones by name, or a user's. HighAccumulation
wraps any torch optimizer for weights in low precision: gradients add up in high precision, updates are applied in low.

    optimizer = fp8bench.HighAccumulation(model.parameters(), lambda masters: torch.optim.SGD(masters, lr=0.1))

Each parameter has a float32 master, which the inner optimizer updates. The gradient of each micro-batch is added to the
master's float32 gradient as soon as it is there; `step` lets the optimizer change the masters, rounds their updates,
and copies the masters to the parameters in their dtypes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer

from fp8bench.errors import UsageError
from fp8bench.features.train.lab.loop_figures import parameters_of
from fp8bench.features.train.lab.low_precision import (
    MASTERS,
    Gradients,
    LowGradients,
    Parameters,
    Tensors,
    Weights,
    rounded_update,
    state_storages,
)
from fp8bench.features.train.lab.rates import factor_of, group_of, kind_of
from fp8bench.features.train.request import NOT_STEPPED, TrainerSettings, clip_of, parse_optimizer
from fp8bench.features.train.values import State
from fp8bench.nn.moments import Storage, split_into_buckets
from fp8bench.protocols import Operand
from fp8bench.user_code import own_words
from fp8bench.user_code.named import named


def seed_of(purpose: str, *numbers: int) -> int:
    """Returns a seed of 32 bits, the most that a CPU generator takes, different for each purpose and numbers."""
    words = "/".join((purpose, *map(str, numbers)))
    return int.from_bytes(hashlib.sha256(words.encode()).digest()[:4], "big")


# Fused optimizers divide gradients and skip a step on the device, so that the host need not wait.
_LISTED: Mapping[str, Callable[..., Optimizer]] = {
    "adamw": partial(AdamW, fused=True),
    "sgd": partial(SGD, fused=True),
    "adafactor": Adafactor,
}
# At most this many weights are updated at a time, because they are copied to compute their updates. Weights in low
# precision are restored for an update, so for them it is at most this fraction of the model at a time.
_MOST_ELEMENTS, _LOW_PARTS = 1 << 24, 16
# How reports name the states that torch's optimizers keep for a parameter.
_STATE_NAMES = {
    "exp_avg": "first moment",
    "momentum_buffer": "first moment",
    "row_var": "first moment",
    "exp_avg_sq": "second moment",
    "col_var": "second moment",
    "variance": "second moment",
    "step": "steps",
}


class Bucket:
    """Parameters and the optimizer that updates them. Gradients are in the `holders`: the parameters, or the masters of
    a HighAccumulation. All are divided like the model's parameter at `place`; in a user's optimizer (None) each
    separately, and parameters without a gradient are unchanged. States with a parameter's shape are kept in the
    `storages` between steps."""

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Tensors,
        holders: Tensors,
        place: int | None,
        storages: tuple[Storage, Storage] | None = None,
    ) -> None:
        self.optimizer, self.parameters, self.holders, self.place = optimizer, list(parameters), holders, place
        self._storages = storages
        self._stored: dict[tuple[Tensor, str], Operand] = {}

    def begin_states(self) -> None:
        """Lets torch create its states now, by a step of zeros at a rate of 0; it changes no weight and is not
        counted."""
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)
        (group,) = self.optimizer.param_groups
        rate, decay = group["lr"], group["weight_decay"]
        group["lr"] = group["weight_decay"] = 0.0
        self.optimizer.step()
        group["lr"], group["weight_decay"] = rate, decay
        for parameter in self.parameters:
            parameter.grad = None
            for value in self.optimizer.state[parameter].values():
                if isinstance(value, Tensor):
                    value.zero_()
        self.store_states()

    def restore_states(self) -> None:
        for (parameter, name), operand in self._stored.items():
            self.optimizer.state[parameter][name] = self._storage(name).restore(operand)

    def store_states(self) -> None:
        if self._storages is None:
            return
        for parameter, state in self.optimizer.state.items():
            for name, value in list(state.items()):
                if isinstance(value, Tensor) and value.shape == parameter.shape and value.ndim:
                    self._stored[parameter, name] = self._storage(name).keep(state.pop(name))

    def _storage(self, name: str) -> Storage:
        assert self._storages is not None
        return self._storages[_STATE_NAMES.get(name) == "second moment"]

    def update(self, share: float, divisors: Tensors, skip: Tensor) -> bool:
        """Takes the optimizer's step at a share of its rates, unless `skip` is 1; returns False if it was skipped."""
        optimizer, groups = self.optimizer, self.optimizer.param_groups
        # Set a share of the rates for this step only; a user's schedule sets them as well.
        rates = [group["lr"] for group in groups]
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * share
        try:
            if self.place is not None and groups[0].get("fused"):  # divides and skips on the device
                optimizer.grad_scale, optimizer.found_inf = divisors[self.place], skip  # type: ignore[attr-defined]
                optimizer.step()
                del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
                return True
            if bool(skip):
                return False
            if self.place is not None:
                divisors = [divisors[self.place]] * len(self.holders)
            for holder, divisor in zip(self.holders, divisors, strict=True):
                if holder.grad is not None:
                    holder.grad.div_(divisor.to(holder.grad.dtype))
            optimizer.step()
            return True
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate

    def states(self) -> Iterator[tuple[str, list[Tensor]]]:
        """All tensors of the optimizer's states, by torch's names."""
        for state in self.optimizer.state.values():
            yield from ((name, [value]) for name, value in state.items() if isinstance(value, Tensor))
        yield from ((name, operand.tensors) for (_, name), operand in self._stored.items())

    def memory(self) -> State:
        order = {parameter: number for number, parameter in enumerate(self.holders)}
        stored = {f"{order[parameter]}/{name}": operand.tensors for (parameter, name), operand in self._stored.items()}
        return {"torch": self.optimizer.state_dict(), "stored": stored}

    def recall(self, memory: Mapping[str, Any]) -> None:
        self.optimizer.load_state_dict(memory["torch"])
        for key, tensors in memory["stored"].items():
            number, _, name = key.partition("/")
            parameter = self.holders[int(number)]
            self._stored[parameter, name] = Operand(*(tensor.to(parameter.device) for tensor in tensors))


class StepOptimizer:
    """Updates weights. Norms are those of the last step, in the order of `parameters`: those that it updates."""

    def __init__(
        self,
        parameters: Parameters,
        buckets: Sequence[Bucket],
        gradients: Gradients,
        weights: Weights,
        updates: str,
        rate: float | None = None,
        schedule: Any = None,
    ) -> None:
        self.parameters, self._buckets = dict(parameters), buckets
        self.gradients, self.weights = gradients, weights
        self._rate, self._schedule = rate, schedule
        self._round_updates = rounded_update(updates)
        self._norms: dict[Tensor, tuple[Tensor, Tensor]] = {}
        for parameter in parameters.values():
            zero = parameter.new_zeros((), dtype=torch.float32)
            self._norms[parameter] = zero, zero

    @property
    def rate(self) -> float:
        """Returns the full learning rate; for a user's optimizer that of its first group, as its schedule has set
        it."""
        return float(self._buckets[0].optimizer.param_groups[0]["lr"]) if self._rate is None else self._rate

    @torch.no_grad()
    def step(self, share: float, divisors: Tensors, skip: Tensor, measured: bool = True) -> None:
        """Updates by the gradients divided by `divisors`, one per parameter, at a share of the rate. If `skip` is 1
        nothing changes. The size of updates is only computed if `measured`, which takes a copy of the weights, and is 0
        otherwise."""
        self.weights.raise_precision()
        stepped = True
        # Bucket by bucket, so that only one of them is copied, restored and rounded at a time.
        for bucket in self._buckets:
            copied = bucket.parameters if measured or self._round_updates else []
            copies = [parameter.detach().clone() for parameter in copied]
            if bucket.place is not None:
                self.gradients.give(bucket.holders)
            bucket.restore_states()
            stepped = bucket.update(share, divisors, skip)
            if self._round_updates is not None:
                self._round_updates(copies, bucket.parameters)
            bucket.store_states()
            self.gradients.take_back(bucket.holders)
            self.weights.round(bucket.parameters)
            sizes = torch._foreach_norm(bucket.parameters)
            moved = [torch.zeros_like(size) for size in sizes]
            if copies:
                torch._foreach_sub_(copies, bucket.parameters)
                moved = list(torch._foreach_norm(copies))
            for parameter, change, size in zip(bucket.parameters, moved, sizes, strict=True):
                self._norms[parameter] = change.to(torch.float32), size.to(torch.float32)
        # A skipped step does not count for the schedule either.
        if self._schedule is not None and stepped:
            self._schedule.step()
        self.gradients.end()

    @property
    def update_norms(self) -> list[Tensor]:
        return [moved for moved, _ in self._norms.values()]

    @property
    def weight_norms(self) -> list[Tensor]:
        return [size for _, size in self._norms.values()]

    def stored_tensors(self) -> dict[str, list[Tensor]]:
        """Returns all tensors that stay in memory between two steps, by purpose."""
        by_name: dict[str, list[Tensor]] = {name: [] for name in _STATE_NAMES.values()}
        for bucket in self._buckets:
            for name, tensors in bucket.states():
                by_name.setdefault(_STATE_NAMES.get(name, name.replace("_", " ")), []).extend(tensors)
        states = {name: tensors for name, tensors in by_name.items() if tensors}
        return {"weights": self.weights.stored_tensors(), "gradients": self.gradients.stored_tensors(), **states}

    def memory(self) -> State:
        """Returns the state that the next step depends on. Gradients are computed again, but their scales are not."""
        schedule = {} if self._schedule is None else self._schedule.state_dict()
        buckets = [bucket.memory() for bucket in self._buckets]
        weights, gradients = self.weights.stored_tensors(), self.gradients.memory()
        return {"weights": weights, "gradients": gradients, "buckets": buckets, "schedule": schedule}

    @torch.no_grad()
    def recall(self, memory: Mapping[str, Any]) -> None:
        for tensors, name in ((self.weights.stored_tensors(), "weights"), (self.gradients.memory(), "gradients")):
            for tensor, values in zip(tensors, memory[name], strict=True):
                tensor.copy_(values)
        for bucket, values in zip(self._buckets, memory["buckets"], strict=True):
            bucket.recall(values)
        if self._schedule is not None:
            self._schedule.load_state_dict(memory["schedule"])


def make_step_optimizer(parameters: Parameters, settings: TrainerSettings) -> StepOptimizer:
    """Returns the optimizer that --optimizer names, in buckets of parameters with the same rate, weight decay and
    clipping."""
    trained, fmt = list(parameters.values()), settings.gradients
    parts = 1 if settings.parallel == "zero" else settings.micro_batches  # an owner receives their mean, once
    gradients = Gradients(trained) if fmt == "fp32" else LowGradients(trained, parts, fmt == "fp8")
    layers = [parameter for name, parameter in parameters.items() if kind_of(name, parameter.ndim) == "layer"]
    name, keys = parse_optimizer(settings.optimizer)
    decay = float(keys.get("weight_decay", 0.0))
    _, clip_group = clip_of(settings.clip)
    by_group: dict[tuple[float, float, str], list[int]] = {}
    for place, (path, parameter) in enumerate(parameters.items()):
        factor = factor_of(path, parameter.ndim, settings.rates)
        group = group_of(path, parameter.ndim, clip_group)
        by_group.setdefault((factor, decay if parameter.ndim > 1 else 0.0, group), []).append(place)
    most = _MOST_ELEMENTS
    if (settings.optimizer_states, settings.gradients) != ("fp32", "fp32"):
        most = min(most, sum(parameter.numel() for parameter in trained) // _LOW_PARTS)
    buckets = []
    for (factor, bucket_decay, _), places in by_group.items():
        if "weight_decay" in keys:  # norms and biases do not decay
            keys["weight_decay"] = bucket_decay
        for part in split_into_buckets([trained[place].numel() for place in places], most):
            tensors = [trained[place] for place in places[part]]
            optimizer = _named_optimizer(name, tensors, settings.rate * factor, keys)
            storages = state_storages(settings.optimizer_states)
            bucket = Bucket(optimizer, tensors, tensors, places[part][0], storages)
            if name in _LISTED:
                bucket.begin_states()
            buckets.append(bucket)
    weights = MASTERS[settings.master](trained, layers)  # last: it frees the initial values of optimizers
    return StepOptimizer(parameters, buckets, gradients, weights, settings.updates, settings.rate)


def _named_optimizer(name: str, parameters: Tensors, rate: float, keys: Mapping[str, Any]) -> Optimizer:
    if name in _LISTED:
        return _LISTED[name](parameters, lr=rate, **keys)
    try:
        optimizer = named(name)(parameters, lr=rate, **keys)
    except Exception as error:
        raise UsageError(f"--optimizer {name} cannot be made: {own_words(error)}.") from error
    return _check_optimizer(optimizer, f"--optimizer {name}", "Give a class of torch optimizers: FILE.py:CLASS.")


def wrap_own_optimizer(
    name: str, model: nn.Module, make: Callable[..., Any], schedule: Callable[..., Any] | None, updates: str = "fp32"
) -> StepOptimizer:
    """Wraps the optimizer and schedule that the maker `name` gives. The host decides whether a step is skipped, which
    waits for the device once more. Raises UsageError for unsupported optimizers."""
    try:
        optimizer = make(model)
        scheduler = schedule(optimizer) if schedule is not None else None
    except Exception as error:
        raise UsageError(f"{name}: its optimizer or schedule cannot be made: {own_words(error)}.") from error
    advice = (
        "Give a function that takes the model and returns a torch optimizer: lambda model: "
        "torch.optim.SGD(model.parameters(), lr=0.1)."
    )
    optimizer = _check_optimizer(optimizer, f"{name}: its optimizer function", advice)
    by_loss = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
    if scheduler is not None and (by_loss or not callable(getattr(scheduler, "step", None))):
        raise UsageError(
            f"{name}: its schedule function returns {type(scheduler).__name__}. Give a function that takes the "
            "optimizer and returns a torch scheduler whose step() takes no argument."
        )
    optimized = parameters_of(optimizer)
    low, high = (getattr(optimizer, word, optimized) for word in ("trained", "masters"))
    # A HighAccumulation updates masters, so gradients must be read there.
    masters = dict(zip(map(id, low), high, strict=True))
    parameters = {path: parameter for path, parameter in model.named_parameters() if id(parameter) in masters}
    if len(parameters) < len(masters):
        raise UsageError(f"{name}: its optimizer has parameters that are not the model's. Make it from the model.")
    trained = list(parameters.values())
    holders = [masters[id(parameter)] for parameter in trained]
    bucket = Bucket(optimizer, trained, holders, None)
    return StepOptimizer(parameters, [bucket], Gradients(holders), Weights(trained), updates, schedule=scheduler)


def _check_optimizer(optimizer: object, source: str, advice: str) -> Optimizer:
    """Raises UsageError for an object that is not an optimizer, or cannot step with dense gradients computed once."""
    if not isinstance(optimizer, Optimizer):
        raise UsageError(f"{source} returns {type(optimizer).__name__}. {advice}")
    if isinstance(optimizer, torch.optim.LBFGS | torch.optim.SparseAdam):
        name = type(optimizer).__name__
        raise UsageError(f"{source} returns {name}, which cannot be used: {NOT_STEPPED[name.lower()]}. Choose another.")
    return optimizer


class HighAccumulation(torch.optim.Optimizer):
    """`trained` are the model's parameters and `masters` their float32 copies in the same order: clip and read the
    gradients of `masters`.

    parameters: the model's
    make: a function of the copies that returns their optimizer
    updates: the format to which each update is rounded: fp8 (E4M3, scaled by tensor), bf16, or fp32 for none
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        updates: str = "fp8",
    ) -> None:
        if updates not in ("fp8", "bf16", "fp32"):
            raise UsageError(f"updates must be fp8, bf16 or fp32, got {updates!r:.40}.")
        self.trained = [parameter for parameter in parameters if parameter.requires_grad]
        self.masters = [nn.Parameter(parameter.detach().to(torch.float32, copy=True)) for parameter in self.trained]
        self._inner = make(self.masters)
        self._round_updates = rounded_update(updates)
        super().__init__(self.masters, {})
        self.param_groups, self.state = self._inner.param_groups, self._inner.state
        for parameter, master in zip(self.trained, self.masters, strict=True):
            parameter.register_post_accumulate_grad_hook(partial(_add_to_master, master))  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        copies = [master.detach().clone() for master in self.masters]
        self._inner.step()
        if self._round_updates is not None:
            self._round_updates(copies, self.masters)
        self._copy_masters()
        return loss

    def _copy_masters(self) -> None:
        for parameter, master in zip(self.trained, self.masters, strict=True):
            parameter.copy_(master)

    def state_dict(self) -> State:
        return {"inner": self._inner.state_dict(), "masters": [master.detach() for master in self.masters]}

    @torch.no_grad()
    def load_state_dict(self, state_dict: State) -> None:
        self._inner.load_state_dict(state_dict["inner"])
        self.param_groups, self.state = self._inner.param_groups, self._inner.state
        for master, values in zip(self.masters, state_dict["masters"], strict=True):
            master.copy_(values)
        self._copy_masters()


def _add_to_master(master: nn.Parameter, parameter: Tensor) -> None:
    assert parameter.grad is not None
    gradient = parameter.grad.to(torch.float32)
    master.grad = gradient if master.grad is None else master.grad + gradient
    parameter.grad = None
