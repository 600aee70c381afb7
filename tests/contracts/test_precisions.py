"""Contract of every precision; new ones are included automatically."""

from __future__ import annotations

import pytest
import torch

from fp8bench.model import DeviceFacts, Level, Support
from fp8bench.nn.linear import Linear
from fp8bench.numerics.norms import relative_frobenius
from fp8bench.protocols import Role, SilentPhases
from fp8bench.protocols.axes import Option
from fp8bench.registry import precisions
from tests.counts import for_each
from tests.facts import A100, B200, CPU, H200, MI300X, V100, gpu

DEVICES = [
    CPU,
    V100,
    A100,
    gpu("L40S", (8, 9)),
    H200,
    B200,
    gpu("of tomorrow", (13, 0)),
    MI300X,
    gpu("unknown", None),
    DeviceFacts("xpu", 0, "something else", 1 << 30, "2.13.0"),
]
NAMES = precisions.names()
OPTIONS = []
for mode in NAMES:
    OPTIONS += [(mode, option) for option in precisions.get(mode).options]


def test_names_and_ranks_are_told_apart() -> None:
    """The default reference has the lowest rank; with equal ranks the choice would be arbitrary."""
    ranks = [precisions.get(name).rank for name in NAMES]
    assert len(set(ranks)) == len(NAMES)
    assert min(zip(ranks, NAMES, strict=True))[1] == "fp32"


@for_each("name", NAMES)
def test_a_precision_introduces_itself(name: str) -> None:
    precision = precisions.get(name)
    assert precision.name == name and name == name.lower() and not set(name) & set(" ,={}/@'")
    assert set(precision.aliases) == {alias for alias, own in precisions.aliases().items() if own == name}
    assert precision.summary.endswith(".") and "\n" not in precision.summary
    assert precision.loss_scale >= 1 and all(one >= 1 for one in precision.multiples)


@for_each(("name", "option"), OPTIONS)
def test_an_option_introduces_itself(name: str, option: Option) -> None:
    known: list[str] = []
    for other in precisions.get(name).options:
        known += [other.name, *other.aliases]
    assert len(set(known)) == len(known) and option.name in known
    assert option.name == option.name.lower() and not set("".join(known)) & set(" ,:={}/@'")
    assert option.description and "\n" not in option.description and not option.description.endswith(".")
    given = str(option.parse(option.default))
    assert option.parse(given) == option.parse(option.default) and precisions.get(name).chosen[
        option.name
    ] == option.parse(given)
    assert precisions.find_canonical_name(f"{name}:{option.name}={given}") == name


@for_each("name", NAMES)
@for_each("facts", DEVICES)
def test_support_is_a_level_with_its_reason(name: str, facts: DeviceFacts) -> None:
    support = precisions.get(name).support(facts)
    assert isinstance(support, Support) and isinstance(support.level, Level)
    assert support.reason and "\n" not in support.reason
    assert precisions.get(name).support(facts) == support


runs_here = pytest.mark.parametrize(
    "name", [name for name in NAMES if precisions.get(name).support(CPU).level is not Level.REFUSED]
)


@runs_here
def test_its_arithmetic_multiplies_and_lets_gradients_flow(name: str) -> None:
    precision = precisions.get(name)
    with precision.scope():
        arithmetic = precision.arithmetic(CPU)
        torch.manual_seed(0)
        linear = Linear(37, 19, arithmetic)
        x = torch.randn(4, 5, 37, requires_grad=True)
        y = linear(x, SilentPhases())
        pull = torch.randn(4, 5, 19)
        y.backward((pull * precision.loss_scale).to(y.dtype))
    assert y.shape == (4, 5, 19) and y.dtype == arithmetic.carrier
    flat, pull = x.detach().reshape(20, 37).double(), pull.reshape(20, 19).double()
    weight = linear.weight.detach().double()
    for found, exact in (
        (y.detach().reshape(20, 19), flat @ weight.T),
        (x.grad, (pull @ weight).reshape(4, 5, 37)),
        (linear.weight.grad, pull.T @ flat),
    ):
        assert found is not None and found.isfinite().all()
        scale = 1.0 if found.shape == (20, 19) else precision.loss_scale
        assert relative_frobenius(found.double() / scale, exact) < 0.5


@runs_here
def test_casting_changes_no_input_and_can_be_had_again(name: str) -> None:
    for shape in ((6, 64), (1, 1), (3, 33)):
        for x in (torch.randn(shape), torch.zeros(shape)):
            for role in Role:
                before = x.clone()
                arithmetic, again = (precisions.get(name).arithmetic(CPU).layer("one") for _ in range(2))
                one, two = arithmetic.cast(x, role), again.cast(x, role)
                assert torch.equal(x, before)
                assert torch.equal(one.data.float(), two.data.float()) and one.data.shape == x.shape
                turned = arithmetic.turn(one, x, role)
                # Rotated operands are first padded to whole matrices.
                rows, columns = turned.data.shape
                assert rows == shape[1] and shape[0] <= columns < shape[0] + 16
                assert turned.data.float().isfinite().all()


@runs_here
@pytest.mark.parametrize("raises", [False, True])
def test_its_scope_leaves_no_trace(name: str, raises: bool) -> None:
    def switches() -> tuple[object, ...]:
        return (
            torch.get_float32_matmul_precision(),
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            torch.get_num_threads(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_autocast_enabled("cpu"),
        )

    before = switches()
    try:
        with precisions.get(name).scope():
            if raises:
                raise ValueError("planted")
    except ValueError:
        pass
    assert switches() == before
