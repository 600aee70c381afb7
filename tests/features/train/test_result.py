"""A training as calls return it: the value that is kept, a line, a text, and a notebook's table."""

from __future__ import annotations

from fp8bench.features.train.api import TrainingResult, _shown
from fp8bench.features.train.values import KeptTraining
from tests.learning_curves import lines, training


def test_a_result_says_what_the_command_prints() -> None:
    kept = KeptTraining(training(), lines({"fp8": (0.01,) * 5}), True, "store/trainings/t1/training.jsonl")
    result = _shown(kept)
    assert isinstance(result, TrainingResult) and vars(result) == vars(kept)
    assert repr(result).startswith("<Training t1: ") and repr(result).endswith(f", finished, {kept.path}>")
    assert str(result).startswith("training of ") and "how to read this" not in str(result)
    assert "<table>" in result._repr_html_() and "<a href" not in result._repr_html_()
