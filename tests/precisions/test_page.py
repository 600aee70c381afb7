"""docs/precisions.md against the modes themselves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fp8bench.formats.recipes import Recipe
from fp8bench.model import Level
from fp8bench.nn.shared_precisions import RecipePrecision
from fp8bench.protocols.axes import Option
from fp8bench.registry import precisions
from tests.facts import B200, H200, gpu

ADA = gpu("L40S", (8, 9))
# What the page states about a mode, depending on native support.
WHERE = {
    (True, True, True): "NVIDIA from 8.9",
    (False, True, False): "NVIDIA 9.0",
    (False, False, True): "NVIDIA from 10.0",
    (False, False, False): "nowhere",
}

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "precisions.md").read_text()


def table(title: str) -> list[list[str]]:
    (rows,) = re.findall(rf"^\| mode \| {title} .*\n\|[-|]+\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    return [re.split(r" *\| *", row)[1:-1] for row in rows.splitlines()]


def recipes() -> dict[str, Recipe]:
    result = sorted((precisions.get(name) for name in precisions.names()), key=lambda one: one.rank)
    return {precision.name: precision.recipe for precision in result if isinstance(precision, RecipePrecision)}


def words(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def options() -> list[list[str]]:
    """A mode, its option, the option's values and its aliases."""
    return [[mode, words(name)[0], *cells] for modes, name, *cells in table("option") for mode in words(modes)]


def find_option(mode: str, name: str) -> Option:
    (option,) = (option for option in precisions.get(mode).options if option.name == name)
    return option


def test_formats_by_role_and_where_a_mode_is_native() -> None:
    rows = {words(row[0])[0]: row[1:] for row in table("inputs")}
    assert sorted(rows) == sorted(recipes())
    for name, recipe in recipes().items():
        assert [words(cell)[0] for cell in rows[name][:3]] == [item.fmt.name for item in recipe.treatments]
        native = [precisions.get(name).support(facts).level is Level.NATIVE for facts in (ADA, H200, B200)]
        assert rows[name][4].startswith(WHERE[tuple(native)])
        extents = {item.scaling.name.split()[0] for item in recipe.treatments if item.scaling}
        said = {"tensor": "a tensor", "row": "a row", "1x32": "MX", "1x16": "NVFP4"}
        assert all(said.get(extent, extent) in rows[name][3] for extent in extents)


def test_options_values_defaults_and_aliases() -> None:
    declared = [(mode, option.name) for mode in recipes() for option in precisions.get(mode).options]
    assert sorted((mode, name) for mode, name, *_ in options()) == sorted(declared)
    for mode, name, values, also in options():
        option = find_option(mode, name)
        assert tuple(words(also)) == option.aliases
        if words(values):
            assert words(values)[0] == option.default
            assert [str(option.parse(word)) for word in words(values)] == words(values)
        else:
            default, low, high = re.findall(r"\d+", values)
            assert default == option.default and option.parse(low) == int(low) and option.parse(high) == int(high)
            for beyond in (int(low) - 1, int(high) + 1):
                with pytest.raises(ValueError, match=f"from {low} to {high}"):
                    option.parse(str(beyond))


def test_all_values_of_a_choice_are_named() -> None:
    for mode, name, values, _ in options():
        if not words(values) or "or a" in values:
            continue
        with pytest.raises(ValueError, match="expected one of") as caught:
            find_option(mode, name).parse("nonsense of its own")
        known = str(caught.value).removeprefix("expected one of ").partition(";")[0].split(", ")
        assert sorted(known) == sorted(words(values))


def test_modes_on_the_page_are_modes() -> None:
    for word in set(re.findall(r"`([a-z0-9-]+:[a-z0-9_=:-]+)`", PAGE)):
        assert precisions.find_canonical_name(word)
    assert precisions.find_canonical_name("fp8-delayed:margin=1:history=1024") == "fp8-delayed:margin=1"
