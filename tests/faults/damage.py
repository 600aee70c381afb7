"""Ways to damage a file: bytes that change, go, or become other values of JSON."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable

Mutation = Callable[[random.Random, bytes], bytes]
VALUES = (
    None,
    True,
    False,
    -1,
    0,
    1,
    3,
    10**400,
    -(10**20),
    0.5,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    "µ",
    "\ud800",
    "2",
    [],
    [[]],
    [None],
    {},
    [1, 2],
    [[1, 2]],
    ["a"],
    [["a"] * 9] * 9,
    {"a": 1},
    {"a": []},
    "result",
    "machine",
    "nan",
    "inf",
    "-inf",
    "ok",
    "failed",
    "native",
    "refused",
    "gemm",
    "cpu",
)


def flip(chance: random.Random, content: bytes) -> bytes:
    changed = bytearray(content)
    for _ in range(chance.randint(1, 8)):
        changed[chance.randrange(len(changed))] = chance.choice((chance.randrange(256), *b'0129,:[]{}"'))
    return bytes(changed)


def cut(chance: random.Random, content: bytes) -> bytes:
    start, end = sorted(chance.randrange(len(content) + 1) for _ in range(2))
    return content[:start] + content[end:] if chance.random() < 0.5 else content[:end]


def replace_value(chance: random.Random, content: bytes) -> bytes:
    """Keeps JSON valid: a value becomes too large, another kind, missing, or renamed."""
    whole = json.loads(content)
    path = chance.choice(_places(whole)[1:] or [()])
    if not path:
        return content
    holder = whole
    for key in path[:-1]:
        holder = holder[key]
    what = chance.random()
    if what < 0.15:
        del holder[path[-1]]
    elif what < 0.25 and isinstance(holder, dict):
        holder[chance.choice(("version", "a", "\ud800", ""))] = holder.pop(path[-1])
    elif what < 0.35 and isinstance(holder, list):
        holder.append(copy.deepcopy(chance.choice(VALUES)))
    else:
        holder[path[-1]] = copy.deepcopy(chance.choice(VALUES))
    return json.dumps(whole).encode()


def _places(value: object, here: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    places = [here]
    for key, one in inside:
        places.extend(_places(one, (*here, key)))
    return places
