"""An ablation, its arms, and its file in a store: `ablations/<utc>-<id>/ablation.json`."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from fp8bench.errors import StoreError
from fp8bench.files import unsealed
from fp8bench.jobs.kinds import Kind, View
from fp8bench.model import Level, Scalar
from fp8bench.model.codec import Malformed, decode
from fp8bench.store.kept_lines import fitting

KEPT = "ablation.json"
# Subsets of more options are more arms than memory and patience allow.
MOST_BY_SHAPLEY = 4


@dataclass(frozen=True)
class AblatedOption:
    """A precision, or the value `on` of an axis, which without the option has the value `off` ('': its default)."""

    name: str
    precision: str = ""
    axis: str = ""
    on: str = ""
    off: str = ""


@dataclass(frozen=True)
class AblatedArm:
    """A step with these options. `rounds` are seconds, scaled to the tokens of the arm without options; `why` says why
    something is missing."""

    options: tuple[str, ...]
    case: str
    level: Level = Level.NATIVE
    why: str = ""
    rounds: tuple[float, ...] = ()
    memory: float | None = None
    error: float | None = None
    joules: float | None = None
    labels: tuple[str, ...] = ()

    @property
    def timed(self) -> bool:
        """Whether its time is a speed that compares with others."""
        return bool(self.rounds) and self.level is Level.NATIVE and not self.why


@dataclass(frozen=True)
class Ablation:
    """All arms, the one without options first; `control` are the rounds of its copy, for the noise floor."""

    suite: str
    setting: tuple[tuple[str, Scalar], ...]
    device: str
    device_name: str
    reference: str
    options: tuple[AblatedOption, ...]
    arms: tuple[AblatedArm, ...]
    error: str = ""
    control: tuple[float, ...] = ()
    shapley: bool = False
    started: str = ""
    environment: Mapping[str, Scalar | None] = field(default_factory=dict)
    path: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(option.name for option in self.options)

    def arm(self, options: Sequence[str]) -> AblatedArm:
        wanted = tuple(name for name in self.names if name in options)
        return next(arm for arm in self.arms if arm.options == wanted)


def arms_of(names: Sequence[str], shapley: bool) -> Iterator[tuple[str, ...]]:
    """Yields no option, each alone, each added to those before it, each left out; 3k - 1 arms from three options on."""
    wanted = [(), *((name,) for name in names)]
    wanted += [tuple(names[:count]) for count in range(2, len(names) + 1)]
    wanted += [tuple(other for other in names if other != name) for name in names]
    if shapley:
        wanted += [some for count in range(len(names) + 1) for some in itertools.combinations(names, count)]
    yield from dict.fromkeys(wanted)


class AblationKind(Kind[Ablation]):
    """Ablations have no history, because their arms are measured for one another."""

    name = "ablation"
    holds = Ablation
    refused = ("tensorboard", "wandb")

    def find(self, word: str, store: Path) -> Path | None:
        with contextlib.suppress(OSError, ValueError):
            for path in (Path(word), Path(word) / KEPT):
                if path.is_file() and path.name == KEPT:
                    return path
        matches = fitting(word, {path: self.names(path) for path in _files(store)})
        return matches[0] if len(matches) == 1 else None

    def names(self, path: Path) -> tuple[str, ...]:
        return path.parent.name.rpartition("-")[2], path.parent.name

    def load(self, path: Path) -> Ablation:
        try:
            ablation: Ablation = decode(Ablation, unsealed(json.loads(path.read_bytes())))
        except (OSError, ValueError, TypeError, RecursionError, Malformed) as error:
            raise StoreError(f"{path} is no ablation ({str(error)[:120]}).") from None
        return replace(ablation, path=str(path))

    def view(self, kept: Ablation, charts: bool = False) -> View:
        from fp8bench.features.ablate.view import page_of, rows_of, value_of

        return View(partial(page_of, kept, charts), partial(value_of, kept), partial(rows_of, kept))

    def report(self, kept: Ablation) -> View:
        return self.view(kept, charts=True)

    def lines(self, store: Path) -> Iterator[Callable[[], str]]:
        return (partial(self._line, path) for path in reversed(_files(store)))

    def _line(self, path: Path) -> str:
        ablation = self.load(path)
        return f"{self.names(path)[0]}  ablation of {ablation.suite}: {', '.join(ablation.names)}"


def _files(store: Path) -> list[Path]:
    return sorted((store / "ablations").glob(f"*/{KEPT}"))


KINDS = (AblationKind(),)
