"""A digit that changes, a line that goes, comes twice or stands elsewhere, in a file of a store: named or harmless."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fp8bench.errors import Fp8benchError
from fp8bench.features.duel.kind import DuelKind, start_duel
from fp8bench.features.train.kind import load_training, reopen_training, start_training
from fp8bench.model.codec import encode
from fp8bench.store.acks import append_acks, get_acks_path, load_acks
from fp8bench.store.runs.run_file import load_run, start_run
from tests.counts import counts, for_each
from tests.duels import SESSION, header, result
from tests.older import as_older
from tests.runs import measured
from tests.store.test_acks import ACK
from tests.trainings import row_of, training

Change = Callable[[random.Random, bytes], bytes]


def flip(chance: random.Random, content: bytes) -> bytes:
    places = [place for place, one in enumerate(content) if chr(one).isdigit()] if chance.random() < 0.5 else []
    place = chance.choice(places or range(len(content)))
    new = chance.choice(b"0123456789") if places else content[place] ^ (1 << chance.randrange(8))
    return content[:place] + bytes([new]) + content[place + 1 :]


def cut(chance: random.Random, content: bytes) -> bytes:
    lines = content.splitlines(keepends=True)
    if chance.random() < 0.5 and len(lines) > 1:
        del lines[chance.randrange(len(lines))]
        return b"".join(lines)
    start = chance.randrange(len(content))
    return content[:start] + (content[start + chance.randrange(1, 200) :] if chance.random() < 0.5 else b"")


def swap(chance: random.Random, content: bytes) -> bytes:
    lines = content.splitlines(keepends=True)
    one, other = chance.randrange(len(lines)), chance.randrange(len(lines))
    lines[one], lines[other] = lines[other], lines[one]
    return b"".join(lines)


def twice(chance: random.Random, content: bytes) -> bytes:
    lines = content.splitlines(keepends=True)
    lines.insert(chance.randrange(len(lines) + 1), chance.choice(lines))
    return b"".join(lines)


CHANGES: dict[str, Change] = {"flip": flip, "cut": cut, "swap": swap, "twice": twice}


@dataclass(frozen=True)
class Kind:
    """A kind of file, how it is read, and its damage reports; `ends` means a truncated file is detected."""

    path: Path
    read: Callable[[], tuple[Any, Sequence[str]]]
    ends: bool = True


def a_run(store: Path) -> Kind:
    run, _ = measured()
    writer = start_run(run, store)
    for record in run.records:
        writer.append([record])
    writer.note("something was noticed")
    writer.finish("finished")

    def read() -> tuple[Any, Sequence[str]]:
        found = load_run(writer.path)
        said = replace(found, troubles=())
        return repr(encode(said)), (*found.troubles, *(["it has no end"] if not found.finished else []))

    return Kind(writer.path, read)


def a_stream(store: Path) -> Kind:
    writer = start_training(training(), store)
    writer.append([row_of("fp8", 0, step) for step in range(6)])
    writer.store_point(0, 6, None, ())
    writer.append([row_of("fp8", 0, step) for step in range(6, 9)])
    writer.finish("finished")

    def read() -> tuple[Any, Sequence[str]]:
        found = load_training(writer.path)
        said = (found.training, found.lines)
        return repr(encode(said)), (*found.troubles, *(["it has no end"] if not found.finished else []))

    return Kind(writer.path, read)


def places(store: Path) -> Kind:
    path = a_stream(store).path

    def read() -> tuple[Any, Sequence[str]]:
        writer = reopen_training(path)
        writer.close()
        return writer.points, ()

    return Kind(path.with_name("places.json"), read)


def a_duel(store: Path) -> Kind:
    writer = start_duel(header(), store)
    for one in (result("fp32", SESSION), result("bf16", SESSION)):
        writer.write_result(one)
    writer.write_session(header().cases[0], SESSION)
    writer.finish("finished")
    path = writer.path

    def read() -> tuple[Any, Sequence[str]]:
        found = DuelKind().load(path)
        return repr(encode(replace(found, troubles=()))), (
            *found.troubles,
            *(["it has no end"] if not found.finished else []),
        )

    return Kind(path, read)


def acks(store: Path) -> Kind:
    append_acks(store, [replace(ACK, id=f"{number:02x}") for number in range(5)])

    def read() -> tuple[Any, Sequence[str]]:
        found = load_acks(store)
        return set(found.acks), found.troubles

    return Kind(get_acks_path(store), read, ends=False)


KINDS: dict[str, Callable[[Path], Kind]] = {
    "run": a_run,
    "stream": a_stream,
    "places": places,
    "duel": a_duel,
    "acks": acks,
}


@for_each("kind", list(KINDS))
@counts(40, 340)
def test_whatever_is_changed_is_named_or_harmless(count: int, kind: str, tmp_path: Path) -> None:
    made = KINDS[kind](tmp_path)
    content, (right, troubles) = made.path.read_bytes(), made.read()
    assert not troubles
    chance = random.Random(f"{kind} 20261124")
    for number in range(count):
        name = chance.choice(list(CHANGES))
        changed = CHANGES[name](chance, content)
        made.path.write_bytes(changed)
        try:
            found, troubles = made.read()
        except Fp8benchError:
            continue
        lost_lines = not made.ends and name == "cut"  # the missing length of a truncated file is unknown
        assert found == right or troubles or lost_lines, (number, name)


def test_what_older_versions_wrote_is_read(tmp_path: Path) -> None:
    for kind, make in KINDS.items():
        (tmp_path / kind).mkdir()
        made = make(tmp_path / kind)
        right, _ = made.read()
        if made.path.suffix == ".jsonl":
            as_older(made.path)
        else:
            content = json.loads(made.path.read_text())
            content.pop("sum")
            made.path.write_text(json.dumps(content))
        assert made.read() == (right, ()) or list(made.read()[1]) == [], kind
