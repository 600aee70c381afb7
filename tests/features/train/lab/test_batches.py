"""Windows of a text: a pure function of seed and step, and all parts alike to validate on."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from fp8bench.features.train.lab.evaluate import DIGESTS, Windows
from fp8bench.features.train.values import TokenSpan


@pytest.fixture
def span(tmp_path: Path) -> TokenSpan:
    """A stretch of a file of tokens that count up."""
    file = tmp_path / "tokens"
    np.arange(1000, dtype=np.uint16).tofile(file)
    return TokenSpan(str(file), 100, 700)


def test_a_window_and_the_tokens_that_follow(span: TokenSpan) -> None:
    """Nothing outside the stretch, whose first and last windows come up, too."""
    windows = Windows(span, 595, "cpu", 1000)
    tokens, targets = windows.drawn(0, 3, 0, 100)
    assert tokens.shape == targets.shape == (100, 595) and tokens.is_contiguous()
    assert torch.equal(targets, tokens + 1)
    assert set(tokens[:, 0].tolist()) == set(range(100, 105)) and int(targets.max()) == 699


def test_they_depend_on_seed_and_step_and_on_nothing_else(span: TokenSpan) -> None:
    """Whatever was drawn before, so that a resumed training goes on with the same text."""
    windows, again = Windows(span, 8, "cpu", 1000), Windows(span, 8, "cpu", 1000)
    first = [windows.drawn(5, step, 0, 4)[0] for step in range(20)]
    assert all(torch.equal(again.drawn(5, step, 0, 4)[0], first[step]) for step in reversed(range(20)))
    assert len({tuple(one[:, 0].tolist()) for one in first}) == 20
    assert not torch.equal(windows.drawn(6, 0, 0, 4)[0], first[0])


def test_a_step_has_the_same_windows_however_it_is_cut(span: TokenSpan) -> None:
    """Arms with other micro-batches stay paired."""
    windows = Windows(span, 8, "cpu", 1000)
    whole = windows.drawn(1, 7, 0, 12)[0]
    for batch in (1, 3, 4, 6):
        assert torch.equal(torch.cat([windows.drawn(1, 7, part, batch)[0] for part in range(12 // batch)]), whole)


def test_the_draws_are_these_for_good(span: TokenSpan) -> None:
    """A stored training goes on with the same text under another numpy."""
    words = np.random.Philox(key=3, counter=11 << 192).random_raw(3)
    tokens, _ = Windows(span, 8, "cpu", 1000).drawn(3, 11, 0, 3)
    assert tokens[:, 0].tolist() == [100 + int(word) % 592 for word in words] == [632, 395, 281]


def test_places_are_drawn_evenly(span: TokenSpan) -> None:
    """Every window as often as any other, within what chance does."""
    windows = Windows(TokenSpan(span.path, 100, 208), 8, "cpu", 1000)
    counts = torch.bincount(windows.drawn(0, 0, 0, 20_000)[0][:, 0], minlength=200)[100:200].double()
    assert int((counts > 0).sum()) == 100
    assert float(((counts - 200) ** 2 / 200).sum()) < 170  # chi square of 99 degrees of freedom: 1 in 10,000 above


@pytest.mark.parametrize("most", [1, 5, 73, 74, 75, 1000])
def test_validation_reads_windows_of_all_parts_in_order(span: TokenSpan, most: int) -> None:
    """None overlaps another; as many as there are cover the stretch, up to less than a window."""
    batches = Windows(span, 8, "cpu", 1000).in_order(4, most)
    starts = torch.cat([tokens[:, 0] for tokens, _ in batches]).tolist()
    assert len(starts) == min(most, 74) and starts[0] == 100
    assert all(after - before >= 8 for before, after in pairwise(starts))
    assert starts[-1] + 8 < 700 and (most < 74 or starts[-1] + 8 + 8 >= 700)
    assert all(len(tokens) <= 4 for tokens, _ in batches)


def test_what_does_not_fit_is_refused(span: TokenSpan) -> None:
    """A window longer than the stretch, and a token that the model does not know."""
    with pytest.raises(ValueError, match="600 tokens here; a window of 600 needs one more"):
        Windows(span, 600, "cpu", 1000)
    with pytest.raises(ValueError, match="the model knows those below 256"):
        Windows(span, 500, "cpu", 256).drawn(0, 0, 0, 4)


def test_digests_of_parts_come_to_that_of_the_step(span: TokenSpan) -> None:
    """Each part where it belongs; other text, seeds, steps and orders have others."""
    windows = Windows(span, 8, "cpu", 1000)
    whole = windows.digest(5, 3, 0, 8)
    for count in (2, 4, 8):
        assert sum(windows.digest(5, 3, part, 8 // count) for part in range(count)) % DIGESTS == whole
    assert 2 * windows.digest(5, 3, 0, 4) % DIGESTS != whole
    other = Windows(TokenSpan(span.path, 101, 700), 8, "cpu", 1000)
    assert len({whole, windows.digest(6, 3, 0, 8), windows.digest(5, 4, 0, 8), other.digest(5, 3, 0, 8)}) == 4
