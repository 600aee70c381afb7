"""Speed-up over shapes: which map is chosen, and what stands in its fields."""

from __future__ import annotations

from fp8bench.model import Label, Scalar
from tests.materials import part, shapes
from tests.runs import gemm
from tests.told_before import Told, as_before

Shape = dict[str, Scalar]


def mnk(*sides: tuple[int, int, int]) -> list[Shape]:
    return [{"m": m, "n": n, "k": k, "product": "forward"} for m, n, k in sides]


@as_before
def test_shapes() -> Told:
    full = shapes(*mnk((512, 64, 16), (512, 64, 32), (256, 64, 32)))
    yield (
        "rows are sizes of the output, columns what is contracted; a field without a case is empty",
        part("shapes", full),
    )
    layers: list[Shape] = [
        {"layer": layer, "m": number, "n": number, "k": 8, "product": product}
        for number, (layer, product) in enumerate(
            (layer, product) for layer in ("up", "down") for product in ("forward", "input-gradient")
        )
    ]
    yield "layers of a model stand against its products, of which n and k follow", part("shapes", shapes(*layers))
    yield "shapes that make no map are a list; emulations are in none", part("shapes", gemm())
    three = mnk((1, 1, 1), (2, 1, 1), (3, 1, 1))
    doubtful = shapes(*three, labels=(Label.NOISY,))
    yield "a field says how sure it is: the interval, the verdict, and every doubt", part("shapes", doubtful)
    yield "the best and the worst are named", part("shapes", shapes(*three, speed=0.5))
