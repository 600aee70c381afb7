"""A GPU without memory: torch's meta tensors with that GPU's rules.

torch checks layouts, multiples and scales of products as on CUDA. The rest is refused here: products by fp8bench's
rules, operations that float8 tensors lack, and waiting for the device. Launches are counted by phase. Speed and
library workspaces are not modelled.
"""

from __future__ import annotations

import contextlib
import importlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from fp8bench.formats import operators
from fp8bench.formats.native_codes import LAUNCHES
from fp8bench.formats.product_rules import Product
from fp8bench.model import CELL_PHASES, Case, DeviceFacts
from fp8bench.protocols import SilentPhases, Stamper
from fp8bench.registry import precisions, workloads
from fp8bench.worker.bench import Bench
from fp8bench.worker.clock import PhaseStampClock
from fp8bench.worker.static_scales import step
from tests.rehearsal.launches import AllCompiled, launches_of
from tests.rehearsal.rules import broken_rule, product_of


@dataclass
class Done:
    """A step's launches by phase and by operator, and its scaled products.

    `bytes` are those of the operators' inputs and outputs, each once per operator.
    """

    phases: Counter[str] = field(default_factory=Counter)
    operators: Counter[str] = field(default_factory=Counter)
    products: list[Product] = field(default_factory=list)
    bytes: int = 0

    @property
    def launches(self) -> int:
        return self.operators.total()


class Ledger(TorchDispatchMode, Stamper):  # type: ignore[no-untyped-call]
    """Enters what is launched, and refuses what breaks a rule. Its clock counts launches, not time."""

    def __init__(self, facts: DeviceFacts, pinned: dict[int, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.facts, self.pinned, self.done = facts, pinned, Done()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        given = [*tensors(chain(args, kwargs.values()))]
        wrong = broken_rule(name, args, kwargs, given, self.facts, self.pinned)
        assert not wrong, f"{name}: {wrong}"
        result = func(*args, **kwargs)
        if product := product_of(name, args):
            self.done.products.append(product)
        touched = {id(one): one for one in chain(given, tensors([result])) if one.is_meta}
        launches = self._launches(func, args) if touched else 0
        if launches:
            self.done.operators[name] += launches
            self.done.bytes += sum(one.nbytes for one in touched.values())
        return result

    def _launches(self, func: Any, args: Any) -> int:
        run = operators.OPERATORS.get(func._schema.name)
        if run is None:
            return launches_of(func._schema)
        kernels = operators.KERNELS
        assert isinstance(kernels, AllCompiled)
        earlier_launches = kernels.launches
        with self:  # its work besides kernels
            run(*args)
        return (kernels.launches - earlier_launches) * LAUNCHES.get(func._schema.name, 1)

    def source(self) -> Callable[[], int]:
        return lambda: self.done.launches

    def intervals_ns(self, stamps: Sequence[int]) -> list[int]:
        return [later - earlier for earlier, later in pairwise(stamps)]


def tensors(given: Any) -> Iterator[Tensor]:
    for one in given:
        if isinstance(one, Tensor):
            yield one
        elif isinstance(one, list | tuple):
            yield from tensors(one)


_made_of_numbers = torch.tensor


def made_of_numbers(data: Any, **options: Any) -> Tensor:
    """Replaces torch.tensor, which dispatch modes do not see: on a device it waits for a copy."""
    rehearsing = any(isinstance(mode, Ledger) for mode in _get_current_dispatch_mode_stack())
    place = torch.device(options.get("device") or "cpu")
    assert not rehearsing or place.type == "cpu", "torch.tensor: the host waits for its numbers to be copied"
    return _made_of_numbers(data, **options)


_place = torch.Tensor.data_ptr


def place(tensor: Tensor) -> int:
    """A tensor's address: without memory no two would differ."""
    if not tensor.is_meta:
        return _place(tensor)
    return tensor.untyped_storage()._cdata * 16 + tensor.storage_offset() * tensor.element_size()


class Generator(torch.Generator):
    """Torch has none for tensors without memory."""

    device = torch.device("meta")

    def __new__(cls, device: object) -> Generator:
        return super().__new__(cls, "cpu")


def attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, enable_gqa: bool = False
) -> Tensor:
    """Chooses among the kernels that a GPU has; without one torch stores the scores."""
    assert attn_mask is None, "the fused kernels take no mask"
    if enable_gqa:
        k, v = (one.repeat_interleave(q.shape[1] // k.shape[1], 1) for one in (k, v))
    if q.dtype == torch.float32:
        return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, is_causal)[0]
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]


class Stage:
    """Where steps are rehearsed. `set_up` puts everything in its place until the patches are undone."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self._pinned: dict[int, Tensor] = {}

    def ledger(self, facts: DeviceFacts) -> Ledger:
        return Ledger(facts, self._pinned)

    def set_up(self, patches: pytest.MonkeyPatch) -> None:
        """On the meta device, since fake CUDA tensors would crash a CPU build of torch."""
        patches.setattr("torch._meta_registrations.device_hint", lambda tensor: "cuda")
        patches.setattr(DeviceFacts, "key", property(lambda facts: "cpu" if facts.kind == "cpu" else "meta"))
        patches.setattr(torch.Tensor, "pin_memory", self._pinned_copies())
        patches.setattr(torch.random, "fork_rng", lambda *devices, **options: contextlib.nullcontext())
        patches.setattr(torch, "Generator", Generator)
        patches.setattr(torch, "tensor", made_of_numbers)
        patches.setattr(torch.Tensor, "data_ptr", place)
        patches.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
        patches.setattr(operators, "KERNELS", AllCompiled())
        optimizer = importlib.import_module("torch.optim.optimizer")
        patches.setattr(optimizer, "_get_fused_kernels_supported_devices", lambda: ["meta"])
        patches.setattr(optimizer, "_get_foreach_kernels_supported_devices", lambda: ["meta"])

    def second_step(self, case: Case, facts: DeviceFacts) -> Done:
        workload = workloads.get(case.workload)
        with precisions.get(case.precision).scope():
            setup = self.bench._make_case_setup(case, facts)
            state = workload.prepare(setup)
            step(workload, state, setup.scales, SilentPhases())
            ledger = self.ledger(facts)
            clock = PhaseStampClock(ledger)
            with ledger:
                clock.begin()
                step(workload, state, setup.scales, clock)
                codes, stamps = clock.end()
        for code, count in zip(codes, ledger.intervals_ns(stamps), strict=True):
            ledger.done.phases[CELL_PHASES[code]] += count
        self._pinned.clear()
        return ledger.done

    def _pinned_copies(self) -> Callable[[Tensor], Tensor]:
        def pin(tensor: Tensor) -> Tensor:
            copy = tensor.clone()
            self._pinned[copy.untyped_storage().data_ptr()] = copy
            return copy

        return pin
