"""The callables that can be audited: which data and arguments each kind is called with, and what it promises."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from fp8bench.features.audit.operands import (
    DATA,
    Promised,
    Rounded,
    drawn,
    promised_by,
    rounded,
    scale_matrix,
    spread,
)
from fp8bench.features.audit.promises import AttentionPromise, CastPromise, Matrices, ProductPromise, Promise
from fp8bench.features.audit.steps import Hyper, optimizer_promise
from fp8bench.formats.codes import DTYPES, decode, unpack
from fp8bench.formats.grids import E2M1
from fp8bench.formats.hardware import has_hopper_units
from fp8bench.model import DeviceFacts
from fp8bench.model.promises import AuditKind, KeptWeights, Signature, Takes
from fp8bench.nn.arithmetics import RecipeArithmetic
from fp8bench.protocols import Role

_LAYER = "audit"
# Attention is called with a batch of so many.
_BATCH = 2
# The standard deviation of an optimizer's weights; gradients are (this + noise) x a base, so that some change sign.
_SIZE, _STEADY = 0.25, 0.5
_LOW = {KeptWeights.BF16, KeptWeights.STOCHASTIC, KeptWeights.MASTER}


class Shape(NamedTuple):
    """The sides of an input. A product is (M, K) x (N, K), a cast has (M, K) alone, attention M places of N heads of
    size K, an optimizer N steps of a parameter (M, K)."""

    m: int
    n: int
    k: int


class Subject(ABC):
    """One callable under audit. Matrices are drawn and judged on the processor, whatever device it runs on. `sides`
    says which sides of a shape its inputs have, and their names; `shapes` are sizes that it has promised to take,
    `odd` ones may be refused; `data` are the kinds of data that say something about it; `timed` is the first shape
    that is timed, `tall` one beyond the blocks that kernels are tried with, and beyond the sums that bfloat16 holds."""

    kind: ClassVar[AuditKind]
    sides: ClassVar[tuple[tuple[str, str], ...]] = (("m", "M"), ("n", "N"), ("k", "K"))
    # No two sides alike, a square in which a transposition keeps the shape, and a long sum.
    shapes: ClassVar[tuple[Shape, ...]] = (Shape(64, 96, 256), Shape(128, 128, 128), Shape(32, 48, 1024))
    odd: ClassVar[tuple[Shape, ...]] = (
        Shape(1, 96, 256), Shape(33, 47, 256), Shape(64, 96, 200), Shape(17, 40, 48), Shape(130, 258, 144),
        Shape(1, 1, 16),
    )  # fmt: skip
    timed: ClassVar[Shape] = Shape(256, 256, 256)
    tall: ClassVar[Shape] = Shape(520, 264, 4096)
    data: ClassVar[tuple[str, ...]] = tuple(DATA)

    def __init__(self, function: Callable[..., Any], signature: Signature, facts: DeviceFacts) -> None:
        self.function, self.signature, self.facts, self.device = function, signature, facts, facts.key

    @cached_property
    def promised(self) -> Promised:
        return promised_by(self.signature.precision, self.facts)

    @property
    def is_scaled(self) -> bool:
        return all(cast is None or cast.scaling is not None for cast in self.promised.treatments)

    def drawn(self, data: str, shape: Shape, seed: int) -> Matrices:
        sizes = ((shape.m, shape.k), (shape.n, shape.k))[: len(self.sides) - 1]
        return tuple(drawn(data, place, *size, seed, self.promised.carrier) for place, size in enumerate(sizes))

    def zeroed(self, matrices: Matrices) -> Matrices:
        return torch.zeros_like(matrices[0]), *matrices[1:]

    def flops(self, shape: Shape) -> int:
        return 2 * shape.m * shape.n * shape.k

    def arguments(self, matrices: Matrices) -> Matrices:
        return tuple(matrix.to(self.device, copy=True) for matrix in matrices)

    def results(self, arguments: Matrices) -> dict[str, Tensor]:
        """Calls it, and returns copies of its results on the processor, by name."""
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in self.raw(arguments).items()}

    def raw(self, arguments: Matrices) -> dict[str, Tensor]:
        return {self.kind.value: self._tensor(self.function(*arguments))}

    @abstractmethod
    def promises(self, matrices: Matrices) -> dict[str, Promise]:
        """What each result should be."""

    def _tensor(self, answer: object) -> Tensor:
        if not isinstance(answer, Tensor):
            raise TypeError(f"it gave {type(answer).__name__}, and a tensor was expected")
        return answer


class ProductSubject(Subject):
    """Is called with two matrices, or with the codes and scales of both."""

    kind = AuditKind.PRODUCT

    def arguments(self, matrices: Matrices) -> Matrices:
        turned = self.signature.second == "kn"
        if self.signature.takes is Takes.VALUES:
            a, b = matrices
            return super().arguments((a, b.t().contiguous() if turned else b))
        kept, treatment = self._kept(matrices), self.promised.treatments[0]
        codes, scales = [side.codes.to(self.device) for side in kept], [side.scales for side in kept]
        fmt = None if treatment is None or treatment.scaling is None else treatment.scaling.scale
        if fmt is None:
            scales = [scale.reshape(()) if scale.numel() == 1 else scale for scale in scales]
        else:
            scales = [scale.to(torch.float8_e8m0fnu if fmt.name == "e8m0" else DTYPES[fmt.name]) for scale in scales]
        scales = [scale.to(self.device) for scale in scales]
        whole = [torch.tensor(side.tensor_scale, device=self.device) for side in kept if side.tensor_scale is not None]
        return codes[0], codes[1].t() if turned else codes[1], *scales, *whole

    def promises(self, matrices: Matrices) -> dict[str, Promise]:
        return {"product": ProductPromise(*self._kept(matrices), hopper=has_hopper_units(self.facts))}

    def _kept(self, matrices: Matrices) -> tuple[Rounded, Rounded]:
        (a, b), (first, second, _) = matrices, self.promised.treatments
        kept = rounded(a, first), rounded(b, second)
        given = self.signature.takes is Takes.VALUES
        return kept if given else (replace(kept[0], given=None), replace(kept[1], given=None))


class CastSubject(Subject):
    """Is called with one matrix."""

    kind = AuditKind.CAST
    sides = (("m", "M"), ("k", "K"))

    def flops(self, shape: Shape) -> int:
        return 0

    def raw(self, arguments: Matrices) -> dict[str, Tensor]:
        answer = self.function(*arguments)
        if isinstance(answer, Tensor):
            return {"cast": answer.to(torch.float32)}
        if not isinstance(answer, tuple | list) or not 2 <= len(answer) <= 3:
            words = f"it gave {type(answer).__name__}, and values, or codes with their scales, were expected"
            raise TypeError(words)
        codes, scale, *whole = (self._tensor(part).detach().cpu() for part in answer)
        elements = decoded(codes, arguments[0].shape[-1])
        values = elements * spread(scale_matrix(scale), elements)
        return {"cast": values * float(whole[0]) if whole else values}

    def promises(self, matrices: Matrices) -> dict[str, Promise]:
        return {"cast": CastPromise(rounded(matrices[0], self.promised.treatments[0]))}


def decoded(codes: Tensor, columns: int) -> Tensor:
    """Returns elements from the codes that a cast gave: float8, four-bit codes two a byte, or plain values."""
    if codes.dtype == torch.uint8 or "float4" in str(codes.dtype):
        return decode(unpack(codes.view(torch.uint8), E2M1, columns), E2M1, checked=False)
    return codes.to(torch.float32)


class LinearSubject(Subject):
    """Is called with inputs and a weight that need gradients. The gradient of its result is drawn."""

    kind = AuditKind.LINEAR
    tall = Shape(520, 264, 2080)

    def drawn(self, data: str, shape: Shape, seed: int) -> Matrices:
        gradient = drawn("normal", 2, shape.m, shape.n, seed, self.promised.carrier)
        return (*super().drawn(data, shape, seed), gradient)

    def arguments(self, matrices: Matrices) -> Matrices:
        x, weight, gradient = super().arguments(matrices)
        return x.requires_grad_(), weight.requires_grad_(), gradient

    def raw(self, arguments: Matrices) -> dict[str, Tensor]:
        x, weight, gradient = arguments
        answer = self._tensor(self.function(x, weight))
        into_x, into_weight = torch.autograd.grad(answer, (x, weight), gradient.to(answer.dtype))
        return {"forward": answer, "input gradient": into_x, "weight gradient": into_weight}

    def promises(self, matrices: Matrices) -> dict[str, Promise]:
        x, weight, gradient = matrices
        role = dict(zip(Role, self.promised.treatments, strict=True))
        high = self.promised.recipe is not None and self.promised.recipe.high_weight_gradient
        products = {
            "forward": ((x, Role.INPUT), (weight, Role.WEIGHT), False),
            "input gradient": ((gradient, Role.GRADIENT), (weight.t(), Role.WEIGHT), False),
            "weight gradient": ((gradient.t(), Role.GRADIENT), (x.t(), Role.INPUT), True),
        }
        promises: dict[str, Promise] = {}
        for name, (a, b, last) in products.items():
            first, second = (
                rounded(tensor.contiguous(), None if high and last else role[which]) for tensor, which in (a, b)
            )
            promises[name] = ProductPromise(first, second, self._emulated(a, b, last), has_hopper_units(self.facts))
        return promises

    def _emulated(self, a: tuple[Tensor, Role], b: tuple[Tensor, Role], last: bool) -> Tensor | None:
        recipe = self.promised.recipe
        drawn = recipe is not None and any(role is Role.GRADIENT and recipe.gradient.stochastic for _, role in (a, b))
        if recipe is None or not (drawn or (last and recipe.hadamard)):
            return None
        arithmetic = RecipeArithmetic(recipe, self.promised.carrier).layer(_LAYER)
        cast = arithmetic.turned if last else arithmetic.cast
        first, second = (cast(tensor.contiguous(), role) for tensor, role in (a, b))
        return arithmetic.product(first, second, self.promised.carrier)


class AttentionSubject(Subject):
    """Is called with queries, keys and values, (2, heads, places, size) each; it divides scores by sqrt(size)."""

    kind = AuditKind.ATTENTION
    shapes = (Shape(64, 4, 64), Shape(128, 2, 32), Shape(96, 3, 128))
    odd = (Shape(1, 2, 64), Shape(33, 3, 64), Shape(65, 2, 32), Shape(130, 1, 128))
    timed = Shape(128, 1, 64)
    tall = Shape(520, 1, 64)
    data = ("normal", "uniform", "integers", "small", "outliers across the contraction")

    def drawn(self, data: str, shape: Shape, seed: int) -> Matrices:
        m, n, k = shape
        made = (drawn(data, place, _BATCH * n * m, k, seed, torch.float32) for place in range(3))
        # Scores of a few units: the softmax of larger ones picks one value, and would hide how they were made.
        scaled = (tensor / tensor.square().mean().sqrt().clamp(min=2.0**-30) for tensor in made)
        return tuple(tensor.view(_BATCH, n, m, k).to(self.promised.carrier) for tensor in scaled)

    def zeroed(self, matrices: Matrices) -> Matrices:
        return *matrices[:2], torch.zeros_like(matrices[2])

    def flops(self, shape: Shape) -> int:
        return 4 * _BATCH * shape.n * shape.m**2 * shape.k

    def promises(self, matrices: Matrices) -> dict[str, Promise]:
        return {"attention": AttentionPromise(matrices, self.promised.treatments[0], self.signature.causal)}


class OptimizerSubject(Subject):
    """Is made of one parameter (M, K), which takes `n` steps with another gradient each."""

    kind = AuditKind.OPTIMIZER
    sides = (("m", "M"), ("k", "K"), ("n", "steps"))
    shapes = (Shape(64, 2, 64), Shape(16, 24, 256))
    odd = (Shape(1, 3, 96), Shape(33, 3, 47), Shape(130, 3, 40))
    many = Shape(16, 1000, 256)
    timed = Shape(256, 2, 256)
    data = ("normal", "rows of different sizes", "many octaves", "one-hot rows", "small")

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.signature.weights in _LOW else torch.float32

    def drawn(self, data: str, shape: Shape, seed: int) -> Matrices:
        """Returns gradients, which keep their sizes from step to step, and weights."""
        base = drawn(data, 0, shape.m, shape.k, seed, torch.float32)
        noise = drawn("normal", 1, shape.n * shape.m, shape.k, seed, torch.float32).view(shape.n, shape.m, shape.k)
        weights = drawn("normal", 2, shape.m, shape.k, seed, torch.float32)
        return (base * (_STEADY + noise)).to(self.dtype), (_SIZE * weights).to(self.dtype)

    def zeroed(self, matrices: Matrices) -> Matrices:
        return tuple(map(torch.zeros_like, matrices))

    def flops(self, shape: Shape) -> int:
        return 0

    def raw(self, arguments: Matrices) -> dict[str, Tensor]:
        gradients, start = arguments
        weights = nn.Parameter(start.clone())
        optimizer = self.function([weights])
        for gradient in gradients:
            weights.grad = gradient.clone()  # which a step may use up
            optimizer.step()
        return {"update": weights.detach().to(torch.float64) - start.to(torch.float64)}

    def promises(self, matrices: Matrices) -> dict[str, Promise]:
        return {"update": optimizer_promise(self.signature, self.facts, self._hyper, self.dtype, *matrices)}

    @cached_property
    def _hyper(self) -> Hyper:
        optimizer = self.function([nn.Parameter(torch.zeros(1, 16, dtype=self.dtype, device=self.device))])
        groups = getattr(optimizer, "param_groups", None)
        if not groups or not callable(getattr(optimizer, "step", None)):
            raise TypeError(f"it made {type(optimizer).__name__}, and step() and param_groups were expected")
        return Hyper.of(groups[0], self.signature.rule)


SUBJECTS: dict[AuditKind, type[Subject]] = {
    subject.kind: subject
    for subject in (ProductSubject, CastSubject, LinearSubject, AttentionSubject, OptimizerSubject)
}
