"""Speed-up over shapes: which map is chosen, and what stands in its fields."""

from __future__ import annotations

import pytest

from fp8bench.model import Label, Scalar
from fp8bench.report.elements import ChartAxis, Heat
from tests.materials import Made, of_kind, part, shapes
from tests.runs import gemm

Shape = dict[str, Scalar]


def mnk(*sides: tuple[int, int, int]) -> list[Shape]:
    return [{"m": m, "n": n, "k": k, "product": "forward"} for m, n, k in sides]


def heat(made: Made) -> Heat:
    (found,) = of_kind(part("shapes", made), Heat)
    return found


def test_rows_are_sizes_of_the_output_and_columns_what_is_contracted() -> None:
    """A full map of m and k, in the order of their sizes; a field without a case is empty."""
    found = heat(shapes(*mnk((512, 64, 16), (512, 64, 32), (256, 64, 32))))
    assert found.rows == ("m=256", "m=512") and found.columns == ("k=16", "k=32")
    assert found.values == ((None, pytest.approx(4.0)), (pytest.approx(2.0), pytest.approx(3.0)))
    assert found.axis == ChartAxis("speed-up", "x")
    assert found.title == "gemm, bf16: speed-up over fp32 by shape"


def test_layers_of_a_model_stand_against_its_products() -> None:
    """n and k follow from the layer and the product."""
    wanted: list[Shape] = [
        {"layer": layer, "m": number, "n": number, "k": 8, "product": product}
        for number, (layer, product) in enumerate(
            (layer, product) for layer in ("up", "down") for product in ("forward", "input-gradient")
        )
    ]
    found = heat(shapes(*wanted))
    assert found.rows == ("layer=up", "layer=down")
    assert found.columns == ("product=forward", "product=input-gradient")
    assert found.values == ((pytest.approx(2), pytest.approx(3)), (pytest.approx(4), pytest.approx(5)))


def test_shapes_that_make_no_map_are_a_list() -> None:
    """Squares would be the diagonal of a map, nearly all of it empty."""
    found = heat(gemm())
    assert found.rows == ("m=256 n=256 k=256", "m=512 n=512 k=512", "m=1 n=2048 k=2048")
    assert found.columns == ("bf16",) and found.values == (((pytest.approx(1 / 0.512)),),) * 3


def test_a_field_says_how_sure_it_is() -> None:
    """Words that show on hovering: the interval, the verdict, and every doubt."""
    plain = heat(shapes(*mnk((1, 1, 1), (2, 1, 1), (3, 1, 1))))
    assert plain.hints[0] == ("m=1 bf16: 2.00x [1.98, 2.02], faster",)
    doubtful = heat(shapes(*mnk((1, 1, 1), (2, 1, 1), (3, 1, 1)), labels=(Label.NOISY,)))
    assert doubtful.hints[0][0].startswith("m=1 bf16: 2.00x [1.98, 2.02], perhaps faster. In doubt: noisy: so much")
    assert doubtful.description.endswith("3 of them carry a label that casts doubt on it.")


def test_the_description_names_the_best_and_the_worst() -> None:
    found = heat(shapes(*mnk((1, 1, 1), (2, 1, 1), (3, 1, 1)), speed=0.5))
    assert found.description == "2 of 3 are above 1x: from 0.500x at m=1 bf16 to 2.500x at m=3 bf16."


def test_emulations_are_in_no_map() -> None:
    """They have a ratio of times, which is no speed."""
    assert "fp8" not in str(heat(shapes(*mnk((1, 1, 1), (2, 1, 1), (3, 1, 1)))))
