"""Reads claims files (TOML), and refuses rows that nothing can decide, each in a sentence."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fp8bench.errors import UnknownName, UsageError
from fp8bench.features.claim.expressions import evaluate
from fp8bench.features.claim.values import Claim, ClaimKind, Source
from fp8bench.files import read_file
from fp8bench.model.codec import Malformed, decode
from fp8bench.model.specs import METRICS, MetricSpec, spec_of

_RELATIONS = {"=": 1, "<": 1, "<=": 1, ">": 1, ">=": 1, "between": 2}
_NEEDED = {
    ClaimKind.ARITHMETIC: ("figure", "relation", "bound"),
    ClaimKind.MEASURED: ("run", "figure", "relation", "bound", "device"),
    ClaimKind.ALL_OF: ("parts",),
}
# Figures of a training's arm; a gap is a share of the reference's loss.
TRAINING_FIGURES = (
    "loss",
    "held_out",
    "gap",
    "held_out_gap",
    "tokens_per_second",
    "bytes_per_parameter",
    "peak_memory",
    "device_peak_memory",
    "wire_bytes",
    "joules_per_step",
)
# Words of a sentence, the figures (or runs) that measure what they promise, and what would measure it.
_PROMISES = (
    (r"accura\w*|qualit\w*", r"accuracy|score", "accuracy is of a task, and no figure of a run or a training here"),
    (r"converge\w*|loss(?:es)?", r"loss|gap|held_out", "measure `gap` of a training"),
    (r"energy|joules|power (?:draw|consumption)", r"energy|joules|power", "measure `energy ratio`"),
    (r"memory|footprint", r"memory|bytes|batch", "measure `device_peak_memory ratio`"),
    (r"faster|slower|speed\w*|throughput", r"time|speedup|per_second|ceiling_rate", "measure `speedup`"),
)
_TRAINS = re.compile(r"train\b|suite (transformer|learning|vision|diffusion|moe|parallel)\b")
_SPEED_WORDS = re.compile(r"\b(faster|slower|speed-?up|throughput)\b", re.IGNORECASE)


@dataclass(frozen=True)
class ClaimsFile:
    """The rows of a claims file by id, and its text."""

    name: str
    text: str
    claims: Mapping[str, Claim]


def load_catalogue() -> ClaimsFile:
    """Reads the claims that come with fp8bench."""
    return parse_claims("the catalogue", read_file(Path(__file__).with_name("catalogue.toml")).decode())


def load_claims(path: Path) -> ClaimsFile:
    try:
        return parse_claims(str(path), read_file(path).decode())
    except OSError as error:
        raise UsageError(f"the claims file {path} cannot be read ({error.strerror}). Give a .toml file.") from None
    except UnicodeDecodeError:
        raise UsageError(f"the claims file {path} is not UTF-8 text. Save it as such.") from None


def parse_claims(name: str, text: str) -> ClaimsFile:
    try:
        rows = tomllib.loads(text).get("claim")
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{name} is not TOML: {error}.") from None
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise UsageError(f"{name} has no claims. Begin each with a line [[claim]]; docs/claims.md shows a row.")
    claims: dict[str, Claim] = {}
    for number, row in enumerate(rows, 1):
        claim = parse_row(f"{name}, {row.get('id') or f'claim {number}'}", row)
        if claim.id in claims:
            raise UsageError(f"{name} has two claims with the id {claim.id}. Rename one.")
        claims[claim.id] = claim
    return ClaimsFile(name, text, claims)


def parse_row(place: str, row: Mapping[str, Any]) -> Claim:
    """Converts a table of the file. Raises UsageError with the place for a row that nothing can decide."""
    # 1. Names and types.
    names = [field.name for field in fields(Claim)]
    for key in row:
        if key not in names:
            raise UnknownName(f"key of a claim ({place})", key, names)
    source = row.get("source")
    for key in ("id", "sentence", "source", "kind"):
        if not row.get(key):
            raise UsageError(f"{place}: `{key}` is missing. Every claim has an id, a sentence, a source and a kind.")
    if not isinstance(source, dict) or {*source} != {field.name for field in fields(Source)}:
        raise UsageError(f"{place}: source has to be a table with title, publisher, year and address.")
    if row["kind"] not in [*ClaimKind]:
        raise UsageError(f"{place}: kind {row['kind']!r:.40} is not one of {', '.join(ClaimKind)}. Give one of these.")
    try:
        claim = decode(Claim, _as_plain(row))
    except Malformed as error:
        raise UsageError(f"{place}: {error}. docs/claims.md says what each key takes.") from None
    # 2. Whether the row can be decided.
    _check_bound(place, claim)
    if claim.kind is ClaimKind.ARITHMETIC:
        _check_arithmetic(place, claim)
    elif claim.kind is ClaimKind.MEASURED:
        _check_measured(place, claim)
    return claim


def _as_plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the row with lists where a single value may be given, and its case as pairs of texts."""
    plain = dict(row)
    for key in ("bound", "device", "parts", "also"):
        if key in plain and not isinstance(plain[key], list):
            plain[key] = [plain[key]]
    if isinstance(case := plain.get("case"), dict):
        plain["case"] = [[name, str(value)] for name, value in case.items()]
    return plain


def _check_bound(place: str, claim: Claim) -> None:
    for key in _NEEDED[claim.kind]:
        if getattr(claim, key) in ("", ()):
            hint = ' Add device = "any" if numbers alone decide, else "cpu", "cuda" or cards.' * (key == "device")
            raise UsageError(f"{place}: `{key}` is missing, and a claim that is {claim.kind} needs it.{hint}")
    if claim.kind is ClaimKind.ALL_OF:
        return
    if claim.relation not in _RELATIONS:
        raise UsageError(f"{place}: relation {claim.relation!r:.20} is not one of {' '.join(_RELATIONS)}.")
    count = _RELATIONS[claim.relation]
    if len(claim.bound) != count or not all(map(math.isfinite, claim.bound)) or claim.bound[0] > claim.bound[-1]:
        form = "two numbers, the lower one first" if count == 2 else "one number"
        raise UsageError(f"{place}: the relation {claim.relation} takes {form} as its bound. Correct `bound`.")
    if not 0 <= claim.tolerance < 1 or (claim.tolerance and claim.relation not in ("=", "between")):
        raise UsageError(
            f"{place}: a tolerance is a share such as 0.01, of the relations = and between. For the others move the "
            "bound."
        )


def _check_arithmetic(place: str, claim: Claim) -> None:
    words = _SPEED_WORDS.search(claim.sentence)
    if words is not None and "peak" not in claim.sentence.lower():
        raise UsageError(
            f"{place}: {words[0]!r} is about times, and no arithmetic bounds a ratio of two times. Measure it, or say "
            "in the sentence that it is about peaks."
        )
    try:
        evaluate(claim.figure)
    except UsageError as error:
        raise UsageError(f"{place}: {error}") from None


def _check_measured(place: str, claim: Claim) -> None:
    spec = _spec_of_figure(place, claim)
    # 1. The sentence promises no more than the figure measures.
    for words, figures, remedy in _PROMISES:
        promise = re.search(rf"\b(?:{words})\b", claim.sentence, re.IGNORECASE)
        if promise and not re.search(figures, claim.figure):
            raise UsageError(
                f"{place}: {promise[0]!r} promises more than {claim.figure} measures: {remedy}. Reword the sentence, "
                "or change the figure."
            )
    training = re.search(r"\btrain\w*", claim.sentence, re.IGNORECASE)
    if training and not _TRAINS.match(claim.run):
        raise UsageError(
            f"{place}: {training[0]!r} promises more than `{claim.run}` measures, which does not train. Reword the "
            "sentence, or run `train` or the suite transformer."
        )
    # 2. A speed is of a device.
    if claim.figure == "speedup" and "any" in claim.device:
        raise UsageError(f"{place}: a speed is of a device, and device = \"any\" names none. Name cards, or 'cuda'.")
    # 3. The figure's resolution can decide the bound.
    step = resolution_of(claim, spec)
    if claim.relation == "=" and claim.tolerance < step:
        raise UsageError(
            f"{place}: {claim.figure} has a resolution of {100 * step:g}%, which cannot decide a tolerance of "
            f"{100 * claim.tolerance:g}%. Widen the tolerance."
        )
    if claim.is_ratio and any(0 < abs(bound - 1) < step for bound in claim.bound):
        raise UsageError(
            f"{place}: {claim.figure} has a resolution of {100 * step:g}%, which cannot tell {claim.bound[0]:g} from "
            "1. Move the bound."
        )
    # 4. A limit bounds rates and times, no ratio of them.
    if claim.limit:
        if claim.is_ratio or spec is None:
            raise UsageError(
                f"{place}: two lower bounds on time bound no ratio of times, so {claim.figure} has no limit. Remove it."
            )
        try:
            evaluate(claim.limit)
        except UsageError as error:
            raise UsageError(f"{place}: {error}") from None


def _spec_of_figure(place: str, claim: Claim) -> MetricSpec | None:
    """Returns the metric of a run that the figure is of; None for a figure of a training, or of time as a speed-up."""
    name = claim.figure.removesuffix(" ratio")
    if claim.run.startswith("train"):
        if name not in TRAINING_FIGURES:
            raise UnknownName(f"figure of a training ({place})", name, TRAINING_FIGURES)
        return None
    if claim.figure == "speedup":
        return None
    # Suites may name figures themselves, but these end in words that the table of metrics has.
    spec = spec_of(name)
    if name not in METRICS and not spec.description:
        names = [metric for metric in METRICS if "*" not in metric]
        raise UnknownName(
            f"figure of a run ({place})", name, ("speedup", *names), "speedup, and those of docs/reference.md"
        )
    return spec


def resolution_of(claim: Claim, spec: MetricSpec | None) -> float:
    """Returns the smallest share by which the figure can differ for reasons that the claim is not about; 0 is exact."""
    if claim.figure == "speedup":
        return 0.01
    if spec is None:
        return 0.001 if claim.figure.removesuffix(" ratio") in ("loss", "held_out") else 0.0
    return 0.0 if spec.counted or spec.unit in ("B", "count") else spec.least_change
