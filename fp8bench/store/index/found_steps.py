"""What was found out about series of values, remembered in `<store>/figures/steps.json`: steps, under a digest.

It is a cache: a file that is broken is begun anew, one that may not be written, or is a newer fp8bench's, is done
without. A digest names the values and the code that looks at them, so that nothing in it can be out of date.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import cache
from pathlib import Path

import numpy as np

from fp8bench.analysis.steps import change_points, levels
from fp8bench.analysis.steps.change_points import Step, Values, steps_of_many
from fp8bench.files import compact, sealed, unsealed, write_whole

VERSION = 1
# What nobody has asked for goes when it is more than this beside what is asked for.
_MOST_OTHERS = 5000
# So many series take long enough to be sorry that what was found could not be kept.
_WORTH_KEEPING = 100


@dataclass
class Memory:
    """The steps of series that were looked at before. `troubles` are sentences on what did not serve."""

    store: Path
    troubles: list[str] = field(default_factory=list)

    @property
    def path(self) -> Path:
        return self.store / "figures" / "steps.json"

    def steps_of_many(self, series: Sequence[Values]) -> list[tuple[Step, ...]]:
        """The steps of each series, of which only those are looked at that were not before."""
        code = _digest_of_code()
        values = [np.ascontiguousarray(one, dtype="<f8") for one in series]
        digests = [hashlib.blake2b(code + one.tobytes(), digest_size=16).hexdigest() for one in values]
        known = self._recall()
        missing = list({digest: place for place, digest in enumerate(digests) if digest not in known}.values())
        if missing:
            found = steps_of_many([values[place] for place in missing])
            new = {digests[place]: steps for place, steps in zip(missing, found, strict=True)}
            others = {digest: known[digest] for digest in known.keys() - set(digests)}
            known = {digest: new[digest] if digest in new else known[digest] for digest in digests}
            self._learn({**(others if len(others) <= _MOST_OTHERS else {}), **known}, len(new))
        return [known[digest] for digest in digests]

    def _recall(self) -> dict[str, tuple[Step, ...]]:
        """What is remembered; nothing where that cannot be had, and why is a trouble."""
        try:
            content = json.loads(self.path.read_bytes())
            if content["version"] > VERSION:
                self.troubles.append(f"{self.path} is a newer fp8bench's and was left alone")
            elif content["version"] == VERSION:
                known = unsealed(content)["steps"]
                return {digest: tuple(Step(*one) for one in steps) for digest, steps in known.items()}
        except FileNotFoundError:
            pass
        except OSError as error:
            self.troubles.append(f"{self.path} could not be read ({error.strerror})")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            self.troubles.append(f"{self.path} had become unreadable and was begun anew")
            with contextlib.suppress(OSError):
                self.path.unlink()
        return {}

    def _learn(self, found: Mapping[str, Sequence[Step]], count: int) -> None:
        """Write down all of it, of which so many are new."""
        if self.troubles and self.path.exists():
            return  # it was said already, and what lies there is somebody's
        content = {"version": VERSION, "steps": {key: [astuple(step) for step in one] for key, one in found.items()}}
        try:
            plain = json.loads(json.dumps(content, default=lambda number: number.item()))
            # Lost power loses nothing that cannot be found again.
            write_whole(self.path, compact(sealed(plain)), sync=False)
        except OSError as error:
            if count > _WORTH_KEEPING:
                self.troubles.append(
                    f"what was found in {count} series could not be kept in {self.path} ({error.strerror}): the next "
                    "command looks again"
                )


@cache
def _digest_of_code() -> bytes:
    """What would have to be the same for the same steps to be found."""
    files = [Path(str(module.__file__)) for module in (change_points, levels)]
    return hashlib.blake2b(b"".join([np.__version__.encode(), *(path.read_bytes() for path in files)])).digest()
