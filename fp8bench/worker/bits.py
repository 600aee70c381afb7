"""What bits a device gives for the same numbers: a fixed set of operations by dtype, each done several times.

The numbers are drawn as whole ones, which no machine draws otherwise; where two machines of one kind differ in what
comes of them, one computes wrongly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fp8bench.model import DeviceFacts
from fp8bench.model.run import OperationBits
from fp8bench.protocols import Device
from fp8bench.worker.state_bits import digest

Operation = Callable[[Tensor, Tensor, torch.dtype], Tensor]

TIMES = 2
_ROWS, _COLUMNS, _STEPS = 32, 64, 3
_STEP = 2.0**-6
# Of FP8 with three bits of mantissa.
_LARGEST = 448.0


def bits_of(device: Device, facts: DeviceFacts) -> tuple[OperationBits, ...]:
    """Of every operation, in the order of the dtypes; one that the device has not is left out."""
    place = torch.device(facts.kind, facts.index) if facts.kind != "cpu" else torch.device("cpu")
    left, right = (_numbers(seed).to(place) for seed in (1, 2))
    found = []
    for dtype, name, operation in _operations():
        try:
            several = [_hexadecimal(operation(left, right, dtype)) for _ in range(TIMES)]
        except (RuntimeError, NotImplementedError):  # no such kernel here, nor on any machine of its kind
            continue
        found.append(OperationBits(facts.key, str(dtype).removeprefix("torch."), name, tuple(dict.fromkeys(several))))
    device.synchronise(facts.index)
    device.empty_cache()
    return tuple(found)


def bits_of_ranks(facts: DeviceFacts) -> tuple[OperationBits, ...]:
    """What all ranks come to by their exchanges: of numbers whose sums are exact, so that no order makes others."""
    import torch.distributed as dist

    from fp8bench.nn.parallel.exchanges import RankGroup

    assert dist.group.WORLD is not None
    ranks = RankGroup(dist.group.WORLD)
    own = _numbers(3 + ranks.rank).to(facts.key)
    codes = own.to(torch.float8_e4m3fn).view(torch.uint8)  # as bytes: gloo sends no values in FP8
    exchanges: tuple[tuple[str, str, Callable[[], Tensor]], ...] = (
        ("float32", "sum of all ranks", lambda: ranks.added(own)),
        ("uint8", "codes of all ranks", lambda: torch.stack(ranks.everybodys(codes))),
    )
    found = []
    for dtype, name, exchanged in exchanges:
        several = [_hexadecimal(exchanged()) for _ in range(TIMES)]
        found.append(OperationBits(f"{facts.key} of {ranks.size} ranks", dtype, name, tuple(dict.fromkeys(several))))
    return tuple(found)


def _numbers(seed: int) -> Tensor:
    """Multiples of 1/64 from -16 to 16: exact in float32, and drawn as whole numbers, which no vector width changes."""
    random = torch.Generator().manual_seed(seed)
    return torch.randint(-1024, 1025, (_ROWS, _COLUMNS), generator=random).to(torch.float32) * (_STEP / 4)


def _hexadecimal(found: Tensor) -> str:
    return f"{digest(found.clone()):016x}"  # of all its memory, which has to be its own


def _operations() -> Iterator[tuple[torch.dtype, str, Operation]]:
    numbers = {"product": _product, "sum": _sum, "softmax": _softmax, "cast": _cast, "training step": _trained}
    for wide in (torch.float32, torch.bfloat16, torch.float16):
        yield from ((wide, name, operation) for name, operation in numbers.items())
    for narrow in (torch.float8_e4m3fn, torch.float8_e5m2):
        yield narrow, "cast", _cast
        yield narrow, "product", _scaled


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    return a.to(dtype) @ b.to(dtype).T


def _sum(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    return (a * b).to(dtype).sum(1)


def _softmax(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    return (a * b).to(dtype).softmax(1)


def _cast(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    quotients = a / (b.abs() + _STEP)
    return quotients.clamp(-_LARGEST, _LARGEST).to(dtype) if dtype.itemsize == 1 else quotients.to(dtype)


def _scaled(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """A product of FP8 operands; two in e5m2 have no kernel."""
    tensor, other = torch.ones((), device=a.device), torch.float8_e4m3fn
    return torch._scaled_mm(a.to(dtype), b.to(other).T, scale_a=tensor, scale_b=tensor, out_dtype=torch.bfloat16)


def _trained(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """The losses of a few steps of descent in a small network, and its last weights: errors of any of it add up."""
    inputs, wanted = a.to(dtype), b.to(dtype)
    scale = inputs.shape[1] ** -0.5
    weights = [(tensor * scale * _STEP).detach().requires_grad_() for tensor in (inputs.T @ wanted, wanted.T @ inputs)]
    losses = []
    with torch.enable_grad():
        for _ in range(_STEPS):
            loss = ((torch.tanh(inputs @ weights[0]) @ weights[1] - wanted) ** 2).mean()
            gradients = torch.autograd.grad(loss, weights)
            losses.append(loss.detach().reshape(1))
            weights = [
                (weight - _STEP * grad).detach().requires_grad_()
                for weight, grad in zip(weights, gradients, strict=True)
            ]
    return torch.cat([*losses, *(weight.detach().reshape(-1) for weight in weights)])
