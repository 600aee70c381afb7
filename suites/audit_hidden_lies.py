"""Kernels that are right wherever everyday tests look: at most sizes, in most calls, or as long as nobody times them;
and honest kernels that do unusual things.
"""

import random
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fp8bench.features.audit import operands
from fp8bench.user_code.named import make_signature
from suites.audit_kernels import (
    ATTENTION,
    BF16,
    BLOCKS,
    CAUSAL,
    FP8,
    SQUARES,
    Kernel,
    Memory,
    Product,
    attend,
    kernel,
    layer,
    parts,
    plain,
    product,
    remember_by,
    rescaled,
    rounded,
    wide_gradients,
)

_LINEAR = make_signature("linear", "bf16")
_remembering = partial(Kernel, remembers=True)


def _where(wrong: Callable[[int, int, int], bool], lie: Product, right: Product = product) -> Product:
    """Returns a product that is wrong at some sizes (M, N, K)."""
    return lambda a, b: (lie if wrong(len(a), len(b), a.shape[1]) else right)(a, b)


def _half_sum(a: Tensor, b: Tensor) -> Tensor:
    half = a.shape[1] // 2
    return product(a[:, :half], b[:, :half])


def _lose(place: Any) -> Product:
    """Returns a product whose results at a place are zero."""

    def run(a: Tensor, b: Tensor) -> Tensor:
        result = product(a, b)
        result[place] = 0
        return result

    return run


def _some_terms(count: int) -> Product:
    return lambda a, b: product(a[:, :count], b[:, :count])


def _turned_grid(a: Tensor, b: Tensor) -> Tensor:
    """Reads a square grid of the weight's scales transposed."""
    weight = operands.round_operand(b, SQUARES)
    if weight.scales.shape[0] != weight.scales.shape[1]:
        return product(a, b, BLOCKS, SQUARES)
    scales = weight.scales.t().repeat_interleave(128, 0).repeat_interleave(128, 1)
    return (rounded(a, BLOCKS) @ (weight.elements * scales[: b.shape[0], : b.shape[1]]).t()).to(BF16)


def _sample(x: Tensor) -> tuple[int, str]:
    """Returns the address and a sample of the values."""
    return x.data_ptr(), str(x.reshape(-1)[:: max(x.numel() // 16, 1)].tolist())


def _old_after_many(memory: Memory, a: Tensor, b: Tensor) -> Tensor:
    """Returns the third result again, from the fourth call with a large shape on."""
    memory[a.shape, b.shape] = calls = memory.get((a.shape, b.shape), 0) + 1
    if calls > 3 and a.numel() > 200_000:
        return memory["old", a.shape, b.shape].clone()
    result = product(a, b)
    memory["old", a.shape, b.shape] = result
    return result


class LazyTensor(Tensor):
    """A tensor that computes its values only when they are used."""

    made: Callable[[], Tensor]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = [arg.made() if isinstance(arg, LazyTensor) else arg for arg in args]
        return function(*read, **(kwargs or {}))


def _lazy(a: Tensor, b: Tensor) -> Tensor:
    result = torch.empty(len(a), len(b), dtype=BF16).as_subclass(LazyTensor)
    result.made = partial(product, a, b)
    return result


def _in_a_thread(a: Tensor, b: Tensor) -> Tensor:
    """Returns memory that a thread fills a little later."""
    result = torch.zeros(len(a), len(b), dtype=BF16)

    def fill() -> None:
        time.sleep(0.002)
        result.copy_(product(a, b))

    threading.Thread(target=fill).start()
    return result


def _clobbers(when: Callable[[Tensor, Tensor], bool]) -> Product:
    def run(a: Tensor, b: Tensor) -> Tensor:
        result = product(a, b)
        if when(a, b):
            a[-1:] = 0
        return result

    return run


def _beside_its_input(a: Tensor, b: Tensor) -> Tensor:
    """Writes to the element before an operand that is part of a larger matrix."""
    result = product(a, b)
    if not a.is_contiguous() and a.storage_offset():
        torch.as_strided(a, (1,), (1,), a.storage_offset() - 1).zero_()
    return result


def _unwritten_sums(a: Tensor, b: Tensor) -> Tensor:
    result = torch.empty(len(a), len(b), dtype=torch.float32)
    result += rounded(a, FP8) @ rounded(b, FP8).t()
    return result.to(BF16)


def _unwritten_edge(a: Tensor, b: Tensor) -> Tensor:
    """Leaves out columns beyond whole tiles of 64: they have the previous content of the memory."""
    result = torch.empty(len(a), len(b), dtype=BF16)
    written_columns = max(len(b) // 64 * 64, min(len(b), 64))
    result[:, :written_columns] = product(a, b)[:, :written_columns]
    return result


def _one_in(count: int) -> Callable[[Memory, Tensor, Tensor], Tensor]:
    def run(memory: Memory, a: Tensor, b: Tensor) -> Tensor:
        memory["calls"] = memory.get("calls", 0) + 1
        result = product(a, b)
        if memory["calls"] % count == 0:
            result[0] = -result[0]
        return result

    return run


def _by_chance(a: Tensor, b: Tensor) -> Tensor:
    result = product(a, b)
    return result * 2 if random.random() < 1 / 200 else result


_latest: dict[str, Tensor] = {}


def _store_input(x: Tensor, weight: Tensor) -> Tensor:
    _latest["input"] = x.detach()
    return plain(x, weight)


def _latest_gradients(x: Tensor, weight: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Uses the input of the latest forward, not of the matching forward."""
    return wide_gradients(_latest["input"].view(-1, weight.shape[1])[: len(gradient)], weight, gradient)


def _gradients_of_512(x: Tensor, weight: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    return gradient @ weight, gradient[:512].t() @ x[:512]


def _mask(length: int, past: int, later: int) -> Tensor:
    """Returns a causal mask in which rows after a position see `later` further positions."""
    every = torch.ones(length, length, dtype=torch.bool)
    return torch.cat((every.tril()[:past], every.tril(later)[past:]))


def _late_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v, _mask(q.shape[2], 576, 1))


def _window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attends only to the last 1000 positions."""
    visible = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
    return attend(q, k, v, visible & ~visible.tril(-1000))


def _first_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Uses the values of eight heads at most: head 8 gets those of head 0."""
    which = torch.arange(q.shape[1]) % 8
    return attend(q, k, v[:, which])


def _one_size(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scales scores for a head size of 64, also for larger heads."""
    return attend(q, k, v, scale=min(q.shape[-1], 64) ** -0.5) if q.shape[-1] in (80, 96, 112) else attend(q, k, v)


HIDDEN_LIES: tuple[Kernel, ...] = (
    Kernel("half of K where M is a multiple of 256", "fp8", _where(lambda m, n, k: m % 256 == 0, _half_sum)),
    Kernel("columns past 512 are zero", "fp8", _lose(np.s_[:, 512:])),
    Kernel("columns past 1000 are zero", "fp8", _lose(np.s_[:, 1000:])),
    Kernel("columns past 20000 are zero", "fp8", _lose(np.s_[:, 20_000:])),
    Kernel("rows past 1500 are zero", "fp8", _lose(np.s_[1500:])),
    Kernel("a square grid of weight scales is transposed", "fp8-block", _turned_grid),
    Kernel("block scales are one off beyond 40", "mxfp8",
           rescaled(lambda scales: scales.roll(int(scales.shape[1] > 40), 1))),
    Kernel("wrong where K is 768", "fp8", _where(lambda m, n, k: k == 768, lambda a, b: product(a, b) * 1.02)),
    Kernel("nothing beyond 4096 of K", "fp8", _some_terms(4096)),
    Kernel("nothing beyond 8192 of K", "fp8", _some_terms(8192)),
    Kernel("K of 11008 in bf16", "fp8", _where(lambda m, n, k: k == 11008, plain)),
    Kernel("a square of 4096 in bf16", "fp8", _where(lambda m, n, k: n == k == 4096, plain)),
    Kernel("bf16 sums where M is at most 8", "fp8",
           _where(lambda m, n, k: m <= 8, kernel(sums=parts(64, BF16)), kernel())),
    Kernel("bf16 sums of bf16 where M is at most 8", "bf16",
           _where(lambda m, n, k: m <= 8, lambda a, b: parts(64, BF16)(a, b).to(BF16), plain)),
    Kernel("one row is not cast", "fp8", _where(lambda m, n, k: m == 1, plain)),
    Kernel("odd rows beyond 256 lose the last", "fp8", _where(lambda m, n, k: m > 256 and m % 2 == 1, _lose(-1))),
    Kernel("1024 rows and columns are not summed", "fp8",
           _where(lambda m, n, k: m >= 1024 and n >= 1024, _half_sum)),
    _remembering("results by address and sample", "fp8", remember_by(_sample)),
    _remembering("results by sums", "fp8", remember_by(lambda x: float(x.double().abs().sum()))),
    _remembering("results by version", "fp8", remember_by(lambda x: (x.data_ptr(), x._version))),
    _remembering("old results after three calls", "fp8", _old_after_many),
    Kernel("computed when read", "fp8", _lazy),
    Kernel("computed by a thread", "fp8", _in_a_thread),
    Kernel("an input lost where M is odd", "fp8", _clobbers(lambda a, b: len(a) % 2 == 1 and len(a) > 1)),
    Kernel("an input lost where it is strided", "fp8", _clobbers(lambda a, b: not a.is_contiguous())),
    Kernel("an input lost where it is large", "fp8", _clobbers(lambda a, b: a.numel() >= 1 << 20)),
    Kernel("memory before its input", "fp8", _beside_its_input),
    Kernel("sums on what was in memory", "fp8", _unwritten_sums),
    Kernel("an edge that is not written", "fp8", _unwritten_edge),
    _remembering("one call in 400 differs", "fp8", _one_in(400)),
    _remembering("one call in 900 differs", "fp8", _one_in(900)),
    Kernel("a call differs by chance", "fp8", _by_chance),
    Kernel("backward of the last forward", _LINEAR, layer(_store_input, _latest_gradients)),
    Kernel("the weight gradient of 512 tokens", _LINEAR, layer(differentiate=_gradients_of_512)),
    Kernel("a causal mask that is one off past 576", CAUSAL, _late_mask),
    Kernel("a causal window of 1000", CAUSAL, _window),
    Kernel("values of eight heads", ATTENTION, _first_heads),
    Kernel("scores of a different size", ATTENTION, _one_size),
)  # fmt: skip


def _at_random_places(memory: Memory, a: Tensor, b: Tensor) -> Tensor:
    """Sums in a different order in each call."""
    size = random.choice((16, 32, 64, 96))
    return kernel(sums=parts(size))(a, b)


def _in_one_workspace(memory: Memory, a: Tensor, b: Tensor) -> Tensor:
    """Casts into memory that it reuses between calls, and returns new memory."""
    key = a.shape, b.shape
    left, right = memory.setdefault(key, (torch.empty(a.shape), torch.empty(b.shape)))
    left.copy_(rounded(a, FP8))
    right.copy_(rounded(b, FP8))
    return (left @ right.t()).to(BF16)


def _split_by_size(a: Tensor, b: Tensor) -> Tensor:
    """Sums differently for decoding than for large matrices."""
    size = 32 if len(a) <= 8 else 512
    return kernel(sums=parts(size))(a, b)


def _transposed_result(a: Tensor, b: Tensor) -> Tensor:
    return (rounded(b, FP8) @ rounded(a, FP8).t()).to(BF16).t()


def _part_of_a_larger(a: Tensor, b: Tensor) -> Tensor:
    """Returns part of a padded result."""
    padded = torch.empty(len(a) + 7, len(b) + 9, dtype=BF16)
    padded[: len(a), : len(b)] = product(a, b)
    return padded[: len(a), : len(b)]


def _large_sizes_only(a: Tensor, b: Tensor) -> Tensor:
    if len(a) < 16 or a.shape[1] % 16:
        raise RuntimeError("M must be at least 16, and K a multiple of 16")
    return product(a, b)


def _contiguous_only(a: Tensor, b: Tensor) -> Tensor:
    if not (a.is_contiguous() and b.is_contiguous()):
        raise RuntimeError("operands must be contiguous")
    return product(a, b)


class MarkedTensor(Tensor):
    """A tensor subclass that changes nothing."""


UNUSUAL: tuple[Kernel, ...] = (
    _remembering("another order of sums each time", "fp8", _at_random_places),
    _remembering("a workspace", "fp8", _in_one_workspace),
    Kernel("another way to decode", "fp8", _split_by_size),
    Kernel("a transposed result", "fp8", _transposed_result),
    Kernel("part of a larger result", "fp8", _part_of_a_larger),
    Kernel("refuses few rows", "fp8", _large_sizes_only),
    Kernel("refuses strides", "fp8", _contiguous_only),
    Kernel("a result of a subclass", "fp8", lambda a, b: product(a, b).as_subclass(MarkedTensor)),
    Kernel("a parameter", "fp8", lambda a, b: torch.nn.Parameter(product(a, b), requires_grad=False)),
    Kernel("results in float32", "fp8", lambda a, b: rounded(a, FP8) @ rounded(b, FP8).t()),
    Kernel("a linear layer of torch's", _LINEAR, torch.nn.functional.linear),
    Kernel("a separate linear layer", _LINEAR, layer()),
    Kernel("causal attention by a mask", CAUSAL,
           lambda q, k, v: attend(q, k, v, torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril())),
    Kernel("fp16 squares", "fp16", plain),
    Kernel("emulated blocks", "fp8-block", lambda a, b: product(a, b, BLOCKS, SQUARES)),
)  # fmt: skip
