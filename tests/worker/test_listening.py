"""Arithmetics that tell of their casts: what is said of what, and that nothing else about them changes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp8bench.model import Case, MemoryRole
from fp8bench.nn.arithmetics import PlainArithmetic, counted
from fp8bench.numerics.ranges import Ledger
from fp8bench.protocols import Arithmetic, Operand, Role, Setup, WatchedArithmetic
from fp8bench.registry import precisions
from fp8bench.worker.memory_pass import listening
from tests.counts import for_each
from tests.facts import CPU, H200

R = MemoryRole


class Said:
    """What was said last of each address."""

    def __init__(self) -> None:
        self.words: list[tuple[tuple[int, ...], MemoryRole]] = []

    def __call__(self, addresses: Sequence[int], role: MemoryRole) -> None:
        self.words.append((tuple(addresses), role))

    def of(self, tensor: Tensor | None) -> list[MemoryRole]:
        assert tensor is not None
        return [role for addresses, role in self.words if tensor.untyped_storage().data_ptr() in addresses]


def told(arithmetic: Arithmetic) -> tuple[Arithmetic, Said]:
    """The arithmetic that tells, through a setup as the pass has it."""
    said = Said()
    setup = Setup(Case("mlp", (), "bf16", "cpu"), CPU, 0, arithmetic, arithmetic, {"up": arithmetic})
    changed = listening(setup, said)
    for one in (changed.high, changed.layers["up"]):
        assert isinstance(one, WatchedArithmetic) and one.inner is arithmetic
    return changed.arithmetic, said


def test_a_cast_that_copies_is_told_of_with_its_source() -> None:
    arithmetic, said = told(PlainArithmetic(torch.bfloat16))
    x, w, g = torch.ones(2, 3), torch.ones(4, 3), torch.ones(2, 4)
    a, b, c = (arithmetic.cast(one, role) for one, role in zip((x, w, g), Role, strict=True))
    assert [said.of(one) for one in (x, w, g)] == [[R.ACTIVATIONS], [R.WEIGHTS], [R.GRADIENTS]]
    assert [said.of(one.data) for one in (a, b, c)] == [[R.LOW_ACTIVATIONS], [R.LOW_WEIGHTS], [R.GRADIENTS]]
    arithmetic.turn(a, x, Role.INPUT)
    assert said.of(a.data) == [R.LOW_ACTIVATIONS]


def test_a_cast_that_changes_nothing_makes_no_copy() -> None:
    arithmetic, said = told(PlainArithmetic(torch.float32))
    x = torch.ones(2, 3)
    operand = arithmetic.cast(x, Role.INPUT)
    arithmetic.turn(operand, None, Role.INPUT)  # type: ignore[arg-type]  # as a layer does that kept no source
    assert operand.data.data_ptr() == x.data_ptr() and said.of(x) == [R.ACTIVATIONS]


@for_each("name", ["fp8", "fp8-delayed", "mxfp8", "nvfp4", "fp16", "tf32"])
def test_every_precision_tells_and_computes_what_it_did(name: str) -> None:
    """A layer of its own included, bit for bit, and all that is asked of an arithmetic is answered as before."""
    quiet = precisions.get(name).arithmetic(CPU)
    arithmetic, said = told(precisions.get(name).arithmetic(CPU))
    assert arithmetic.carrier is quiet.carrier
    for word in ("casts", "keeps_source", "explicit", "settles", "plain", "takes_amax"):
        assert getattr(arithmetic, word) is getattr(quiet, word)
    own, own_quiet = arithmetic.layer("up"), quiet.layer("up")
    x = torch.randn(64, 64)
    for role in Role:
        for method in ("cast", "turned", "unscaled"):
            found, wanted = (getattr(one, method)(x, role) for one in (own, own_quiet))
            assert torch.equal(found.data.float(), wanted.data.float())
        turned, wanted = (one.turn(one.cast(x, role), x, role) for one in (own, own_quiet))
        assert torch.equal(turned.data.float(), wanted.data.float())
        for found, wanted in zip(*(one.cast_both(x, role) for one in (own, own_quiet)), strict=True):
            assert (found is None) == (wanted is None)
            assert found is None or torch.equal(found.data.float(), wanted.data.float())
    assert {R.ACTIVATIONS, R.WEIGHTS, R.GRADIENTS} <= {role for _, role in said.words}


def test_both_orientations_that_one_look_gives_are_told_of() -> None:
    arithmetic, said = told(precisions.get("fp8").arithmetic(H200))
    w = torch.randn(16, 32)
    operand, turned = arithmetic.cast_both(w, Role.WEIGHT)
    assert turned is not None and turned.data.data_ptr() != operand.data.data_ptr()
    assert [said.of(one) for one in (w, operand.data, turned.data)] == [[R.WEIGHTS] * 2, *[[R.LOW_WEIGHTS]] * 2]
    ledger = Ledger()
    counted(precisions.get("fp8").arithmetic(H200), "mlp", ledger).cast_both(w, Role.WEIGHT)
    assert [(one.role, one.count) for one in ledger.statistics()] == [("weight", 512)]


class Stiff(Arithmetic):
    """A user's, whose layers are of another class than itself."""

    carrier = torch.float32

    def __init__(self, inner: Arithmetic | None = None) -> None:
        self.inner = inner

    def layer(self, name: str) -> Arithmetic:
        return PlainArithmetic(torch.bfloat16)

    def cast(self, tensor: Tensor, role: Role) -> Operand:
        return Operand(tensor.clone())

    def product(self, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        return a.data @ b.data.t()


def test_a_layer_of_another_class_tells_too() -> None:
    """Also where it remembers nothing of who made it; a layer that is the arithmetic itself is wrapped once."""
    arithmetic, said = told(Stiff())
    x = torch.ones(3, 3)
    operand = arithmetic.layer("up").cast(x, Role.WEIGHT)
    assert said.of(operand.data) == [R.LOW_WEIGHTS]
    plain, _ = told(PlainArithmetic(torch.bfloat16))
    assert plain.layer("up") is plain


def test_nothing_is_said_while_a_graph_is_compiled() -> None:
    arithmetic, said = told(PlainArithmetic(torch.bfloat16))
    compiled = torch.compile(lambda x: arithmetic.cast(x, Role.INPUT).data * 2, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(2, 2)), torch.full((2, 2), 2.0, dtype=torch.bfloat16))
    assert said.words == []
