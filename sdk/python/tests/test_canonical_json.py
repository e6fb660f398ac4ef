"""Both ways to the canonical form of JSON give what a plain one gives, which looks at each number and name by itself."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from oncegate import fingerprint
from oncegate.fingerprint import NotCanonical, canonical_json, parse_json

NUMBERS = """
    0 -0 1 -1 12 9007199254740991 -9007199254740991 9007199254740992 12345678901234567890 0.0 -0.0 1.0 -1.50 49.99 0.1 0.0001
    0.00012 0.00001 0.000001 0.0000001 123456789012.345 99999999999999.5 9999999999999.95 1234567890123.45 1e3 1E-3 1.5e-7
    0.3000000000000001 1000000000000000.5 9007199254740991.0 9007199254740993.0 1e400 100.000000000000 -12.000000000001
""".split()  # noqa: SIM905
STRINGS = [
    "",
    "a",
    "B",
    "a b",
    "ä",
    "€",
    "\U0001f600",
    "\ud83d",
    "\u2028",
    "\x7f",
    '"\\/\b\f\n\r\t',
    "\x01\x1f",
    "\ufffd",
]
NAMES = ["a", "b", "A", "aB", "order_id", "", "ä", "Ä", "ﬀ", "\U0001f600", "1", "a\\b", "\n", "\ud800"]


def some_json(own: random.Random, depth: int) -> str:
    space = own.choice(["", "", " ", "\n\t"])
    kind = own.randrange(8 if depth < 5 else 5)
    if kind == 0:
        return space + own.choice(["null", "true", "false"]) + space
    if kind in (1, 2):
        return space + own.choice(NUMBERS) + space
    if kind in (3, 4):
        return space + json.dumps(own.choice(STRINGS), ensure_ascii=own.random() < 0.8) + space
    listed = [some_json(own, depth + 1) for _ in range(own.randrange(5))]
    if kind == 5:
        return f"{space}[{','.join(listed)}]{space}"
    pairs = [f"{space}{json.dumps(own.choice(NAMES[: own.randrange(2, 15)]))}{space}:{item}" for item in listed]
    return f"{space}{{{','.join(pairs)}}}{space}"


class Number(str):
    __slots__ = ()


PLAIN = json.JSONDecoder(
    parse_int=Number, parse_float=Number, parse_constant=fingerprint._no_constant, object_pairs_hook=fingerprint._members
)


def plain(value: Any, depth: int = 0) -> str:
    if isinstance(value, Number):
        return fingerprint._canonical_number(value)
    if isinstance(value, list | dict) and depth == 128:
        raise NotCanonical("depth")
    if isinstance(value, list):
        return f"[{','.join(plain(item, depth + 1) for item in value)}]"
    if isinstance(value, dict):
        names = sorted(value, key=lambda name: name.encode("utf-16-be"))
        return f"{{{','.join(f'{json.dumps(name, ensure_ascii=False)}:{plain(value[name], depth + 1)}' for name in names)}}}"
    return json.dumps(value, ensure_ascii=False)


def slowly(text: str) -> bytes | None:
    try:
        expected = plain(PLAIN.decode(text)).encode()
    except (ValueError, RecursionError, NotCanonical):
        expected = None
    try:
        found = canonical_json(parse_json(text.encode())).encode()
    except (NotCanonical, RecursionError):
        found = None
    assert found == expected, text
    return expected


def quickly(text: str) -> bytes | str | None:
    try:
        usual = fingerprint._usual_json(text)
    except (ValueError, RecursionError, NotCanonical):
        return None
    return "left" if usual is None else usual


@pytest.mark.parametrize("seed", range(20))
def test_random_bodies(seed: int) -> None:
    own, decided = random.Random(seed), 0
    for _ in range(500):
        text = some_json(own, 0)
        try:
            text.encode()
        except UnicodeEncodeError:
            continue
        found = quickly(text)
        if found != "left":
            decided += found is not None
            assert found == slowly(text), text
    assert decided > 50


@pytest.mark.parametrize("number", NUMBERS)
def test_numbers(number: str) -> None:
    found = quickly(number)
    assert found in ("left", slowly(number))


def test_random_numbers() -> None:
    own, decided = random.Random(1), 0
    for _ in range(20_000):
        digits = own.randrange(1, 18)
        text = str(own.randrange(10**digits))
        if own.random() < 0.8:
            text += "." + "".join(own.choices("0123456789", k=own.randrange(1, 12)))
        text = own.choice(["", "-"]) + text
        found = quickly(text)
        if found != "left":
            decided += found is not None
            assert found == slowly(text), text
    assert decided > 5000


@pytest.mark.parametrize("depth", [127, 128, 129, 5000, 100_000])
def test_depth(depth: int) -> None:
    text = "[" * depth + "]" * depth
    found = quickly(text)
    assert found == ("left" if depth > 128 else slowly(text))
    assert (slowly(text) is None) == (depth > 128)
