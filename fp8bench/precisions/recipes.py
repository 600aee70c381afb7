"""custom: any element format under any scaling."""

from __future__ import annotations

from fp8bench.errors import RecipeRefused
from fp8bench.formats import hardware
from fp8bench.formats.grids import E4M3, E8M0, FORMATS, Format
from fp8bench.formats.recipes import Recipe, ScaleRounding, Scaling, Treatment
from fp8bench.model import DeviceFacts, Support
from fp8bench.nn.shared_precisions import HIGH_WEIGHT_GRADIENT, RecipePrecision
from fp8bench.protocols.axes import Option, one_of
from fp8bench.registry import precisions

# Rows and columns of a block, the format of its scale, and how that is rounded unless it is said.
_SCALINGS: dict[str, tuple[int, int, Format | None, ScaleRounding]] = {
    "tensor": (0, 0, None, ScaleRounding.EXACT),
    "row": (1, 0, None, ScaleRounding.EXACT),
    "1x128": (1, 128, None, ScaleRounding.EXACT),
    "128x128": (128, 128, None, ScaleRounding.EXACT),
    "mx": (1, 32, E8M0, ScaleRounding.RCEIL),
    "nvfp4": (1, 16, E4M3, ScaleRounding.NEAREST),
}
_NONE, _AUTO, _SAME = "none", "auto", "same"
_ELEMENTS = tuple(name for name, fmt in FORMATS.items() if fmt is not E8M0)


def _element(text: str) -> str:
    """The name of an element format; e4m3 is e4m3fn, the one that all hardware but MI300 has."""
    return one_of(*_ELEMENTS)(E4M3.name if text == "e4m3" else text)


def _own(role: str) -> Option:
    return Option(
        role, f"the format of {role}s, or the {_SAME}", _SAME, lambda text: _SAME if text == _SAME else _element(text)
    )


@precisions.register("custom")
class Custom(RecipePrecision):
    """No recipe that anybody trains with, but every cell of the table of formats and scalings."""

    name = "custom"
    summary = (
        "Any element format under any scaling, e4m3fn under one float32 scale a tensor unless told otherwise: "
        "custom:format=e3m2:scaling=row."
    )
    rank = 90
    words = "custom formats"
    options = (
        Option("format", f"of all tensors: {', '.join(_ELEMENTS)}", E4M3.name, _element),
        _own("input"), _own("weight"), _own("gradient"),
        Option("scaling", f"what shares a scale: {_NONE}, {', '.join(_SCALINGS)}", "tensor", one_of(_NONE, *_SCALINGS)),
        Option("scale", f"how scales are rounded; {_AUTO}: exact, rceil for mx, nearest for nvfp4", _AUTO,
               one_of(_AUTO, *ScaleRounding)),
        HIGH_WEIGHT_GRADIENT,
    )  # fmt: skip

    def made(self) -> Recipe:
        words = [str(self.chosen[role]) for role in ("input", "weight", "gradient")]
        common = str(self.chosen["format"])
        return self.recipe_of(Treatment(FORMATS[common if word == _SAME else word], self._scaling()) for word in words)

    def own_support(self, facts: DeviceFacts) -> Support:
        """Emulated also where it happens to be a recipe that has units."""
        return hardware.emulated_everywhere(facts, self.words)

    def _scaling(self) -> Scaling | None:
        extent, rounding = str(self.chosen["scaling"]), str(self.chosen["scale"])
        if extent == _NONE:
            if rounding != _AUTO:
                raise RecipeRefused(f"scaling={_NONE} leaves scale={rounding} nothing to round: leave one out.")
            return None
        rows, columns, kept, usual = _SCALINGS[extent]
        return Scaling(rows, columns, kept, usual if rounding == _AUTO else ScaleRounding(rounding))
