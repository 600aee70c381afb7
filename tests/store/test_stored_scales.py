"""Scales that a run has kept, found by its name; a run without any is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fp8bench.errors import UsageError
from fp8bench.model import LayerScale, Request
from fp8bench.store import stored_scales


def run(*records: tuple[str, float]) -> Any:
    kept = [(SimpleNamespace(precision=mode), LayerScale("up", "input", amax, 448 / amax)) for mode, amax in records]
    return SimpleNamespace(id="a1b2", records=[SimpleNamespace(case=case, scales=(one,)) for case, one in kept])


def test_cases_of_one_precision_give_the_largest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(
        stored_scales, "load_named", lambda word, store: run(("fp8", 2.0), ("fp8", 3.0), ("fp8-e4m3", 1))
    )
    request = stored_scales.with_stored_scales(Request("mlp", scales_from="last"), tmp_path)
    assert request.known_scales == (("fp8", "up", "input", 3.0), ("fp8-e4m3", "up", "input", 1))
    assert request.scales is not None and request.scales.known_for("fp8") == {("up", "input"): 3.0}
    assert request.scales.known_for("fp8-delayed") == {("up", "input"): 3.0}
    assert stored_scales.with_stored_scales(request, tmp_path) is request
    plain = Request("mlp")
    assert stored_scales.with_stored_scales(plain, tmp_path) is plain


def test_a_run_without_scales_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(stored_scales, "load_named", lambda word, store: run())
    with pytest.raises(UsageError, match=r"run a1b2 has kept no scales. Measure it with --static-scales N"):
        stored_scales.with_stored_scales(Request("mlp", scales_from="a1"), tmp_path)
