"""Ways of delayed scaling, as `fp8bench show ID --histories ARM` prints them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fp8bench.features.train.kept import start_training
from fp8bench.features.train.values import Arm, LayerReading
from tests.commands import Say, unfolded
from tests.learning_curves import training

ARM = Arm("fp8-delayed", "fp8-delayed:formats=e4m3", native=False)


@pytest.fixture
def kept(store: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A training whose gradients grow by an octave at the fifth of eight steps."""
    writer = start_training(replace(training(ARM), id="0000beef"), store)
    for role in ("input", "weight", "gradient"):
        writer.append(
            [
                LayerReading(ARM.name, 0, step, "head", role, 2.0 if step > 3 and role == "gradient" else 1.0, 1e-4,
                             0.0, 1.0, 0.0)
                for step in range(8)
            ]
        )  # fmt: skip
    writer.close()
    return "0000beef"


def test_every_way_has_a_row(kept: str, fp8bench: Say) -> None:
    """A margin of an octave spares the gradients."""
    code, out, err = fp8bench("show", kept, "--histories", ARM.name)
    assert (code, err) == (0, "") and "replayed over 24 casts" in out
    rows = [line.split() for line in out.splitlines() if line.split()[:1] in ([str(one)] for one in (1, 4, 1024))]
    cells = {tuple(row[:3]): row[3:] for row in rows}
    # Input, weight, gradient: overflow; octaves at worst; the same for underflow; idle.
    assert cells["1", "0", "1"][:4] == ["-", "-", "12.5%", "1.0"]
    assert cells["1", "1", "1"][:4] == ["-", "-", "-", "-"]
    assert "least left idle, by history 1, margin 1, interval 1" in out
    assert cells["1024", "0", "16"][:4] == ["-", "-", "-", "-"], "no scale was ever renewed"


def test_the_same_for_programs(kept: str, fp8bench: Say) -> None:
    """In the arm's own formats."""
    _, out, _ = fp8bench("show", kept, "--histories", ARM.name, "--json")
    found = [one for one in json.loads(out) if one["delayed"] == json.loads(out)[0]["delayed"]]
    assert [(one["role"], one["casts"], one["overflow"]) for one in found] == [
        ("input", 8, 0.0), ("weight", 8, 0.0), ("gradient", 8, 0.125),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--histories", "fp8-delayd"), "unknown arm 'fp8-delayd'. Did you mean 'fp8-delayed'?"),
        (("--histories", "bf16"), "nothing was watched of bf16, so that there are no amaxes"),
        (("--histories", ARM.name, "--csv", "-"), "is a table, which --csv does not go with"),
    ],
)
def test_what_cannot_be_meant(words: tuple[str, ...], sentence: str, kept: str, fp8bench: Say) -> None:
    """One sentence."""
    code, out, err = fp8bench("show", kept, *words)
    assert (code, out) == (2, "") and sentence in unfolded(err)
