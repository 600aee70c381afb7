"""Real trainings of arms that differ from their reference by rounding alone, and of arms with a planted handicap.

`python -m suites.verdicts --trained` runs it: groups of five seeds, each of which judges an arm whose initial weights
lie one unit in the last place higher, and one that sums in another order. Rates are high, so that rounding grows until
the gaps are as large as the margin. What it writes is the noise of the simulations, too.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from fp8bench.features.train import words
from fp8bench.features.train.lab.lab import Lab
from fp8bench.features.train.request import TrainerSettings, TrainingRequest
from fp8bench.features.train.texts import prepare_text
from fp8bench.features.train.values import Arm, ArmRole, Line, SeedTask, Training, TrainingText
from fp8bench.features.train.verdicts.verdicts import ArmVerdict, verdicts_of
from fp8bench.model import DeviceFacts, Environment
from fp8bench.model.raw import Settings

SEEDS = 5
STEPS = 100
SETTINGS = TrainerSettings(batch=2, sequence=32)
REFERENCE = Arm("bf16", "bf16", ArmRole.REFERENCE)
NUDGES = tuple(Arm(word, "bf16", settings=(("nudge", word),)) for word in ("ulp", "order"))
HANDICAPS = tuple(Arm(f"rate x {share}", "bf16", settings=(("handicap", share),)) for share in (0.8, 0.6, 0.4))
# Rates and groups of seeds: 20 studies of two nudges each.
NULLS = {0.003: 5, 0.01: 5}
PLANTED = {0.001: 4}


@dataclass
class Told:
    """Gaps of nudged arms by rate, on training and on held-out text; how often each verdict was given; sentences."""

    gaps: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    verdicts: dict[str, dict[str, int]] = field(default_factory=dict)
    sentences: list[str] = field(default_factory=list)
    setting: dict[str, object] = field(default_factory=dict)


def study(
    lab: Lab, facts: DeviceFacts, text: TrainingText, arms: tuple[Arm, ...], rate: float, seed: int
) -> tuple[Training, list[Line]]:
    """Train the reference and these in five seeds beside each other."""
    settings, lines = replace(SETTINGS, rate=rate), []
    request = TrainingRequest(("bf16",), settings=settings, steps=STEPS, seeds=SEEDS, seed=seed)
    every = (REFERENCE, *arms)
    for number in range(seed, seed + SEEDS):
        lab.begin(SeedTask(number, every, settings, STEPS, STEPS, text, facts))
        for arm in every:
            lines += [*lab.advance(arm.name, STEPS), *lab.validate(arm.name)]
    return Training(f"rate {rate}", "", "", request, every, facts, Environment({}), text, 0), lines


def main(path: Path) -> int:
    """Write what was found; 1 if a nudged arm was called worse or better, or had the reference's bits."""
    began, told, failed = time.time(), Told(), False
    lab = Lab(Settings())
    facts = lab.probe()[0]
    with TemporaryDirectory() as folder:
        text = prepare_text(None, None, "bytes", Path(folder), SETTINGS.sequence)
        for arms, rates in ((NUDGES, NULLS), (HANDICAPS, PLANTED)):
            for rate, groups in rates.items():
                for group in range(groups):
                    training, lines = study(lab, facts, text, arms, rate, SEEDS * group)
                    among = verdicts_of(training, lines)
                    for one in among.arms:
                        _tell(told, one, rate, words.verdict(one, among))
                        failed |= arms is NUDGES and (one.same_bits or one.judged.learned in ("worse", "better"))
    told.setting = {
        "command": "python -m suites.verdicts --trained", "model": SETTINGS.model, "batch": SETTINGS.batch,
        "sequence": SETTINGS.sequence, "steps": STEPS, "seeds": SEEDS, "text": text.identity,
        "torch": torch.__version__, "python": platform.python_version(), "device": facts.name,
        "seconds": round(time.time() - began),
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(told), indent=1) + "\n")
    for name, counts in told.verdicts.items():
        sys.stdout.write(f"{name}: {counts}\n")
    return int(failed)


def _tell(told: Told, one: ArmVerdict, rate: float, sentence: str) -> None:
    name = f"{one.arm.name}, rate {rate}"
    told.verdicts[name] = dict(Counter(told.verdicts.get(name, {})) + Counter([one.judged.learned.value]))
    told.sentences.append(f"{name}: {sentence}")
    if one.arm in NUDGES:
        gaps = [(round(pair.gap, 6), round(pair.held_out or 0.0, 6)) for pair in one.pairs]
        told.gaps.setdefault(str(rate), []).extend(gaps)
    deviation = statistics.stdev(pair.gap for pair in one.pairs) if len(one.pairs) > 1 else 0.0
    sys.stdout.write(f"{name}: {sentence}; deviation {100 * deviation:.2f}%\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(Path("null_gaps.json")))
