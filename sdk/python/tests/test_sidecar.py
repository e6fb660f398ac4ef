"""The helpers behind a sidecar, without a database."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

import oncegate
from oncegate.transactions import _check_fields

RECORD = "17" * 32


@pytest.mark.parametrize(
    "headers",
    [
        {"oncegate-record": RECORD},
        {"oncegate-token": "3"},
        {"oncegate-record": RECORD, "oncegate-token": "3", "Oncegate-Token": "4"},
        httpx.Headers([("oncegate-record", RECORD), ("oncegate-record", RECORD), ("oncegate-token", "3")]),
    ],
)
def test_half_of_the_fields_is_an_error(headers: Any) -> None:
    with pytest.raises(oncegate.ConfigError, match="must each be there once: does this request come from a sidecar"):
        oncegate.sidecar_attempt(headers)


@pytest.mark.parametrize(
    ("record", "token", "number"),
    [
        ("7", "1", "1"),
        ("AB" * 32, "1", "1"),
        (" ".join(["17"] * 32), "1", "1"),
        (RECORD, "", "1"),
        (RECORD, "-1", "1"),
        (RECORD, "1_0", "1"),
        (RECORD, " 1", "1"),
        (RECORD, "9223372036854775808", "1"),
        (RECORD, "1", "x"),
    ],
)
def test_malformed_fields_are_an_error(record: str, token: str, number: str) -> None:
    with pytest.raises(oncegate.ConfigError, match="is malformed: does this request come from a sidecar"):
        oncegate.sidecar_attempt({"oncegate-record": record, "oncegate-token": token, "oncegate-attempt": number})


def test_the_fields_are_found() -> None:
    assert oncegate.sidecar_attempt({}) is None
    found = oncegate.sidecar_attempt({"Oncegate-Record": RECORD, "Oncegate-Token": "9223372036854775807"})
    assert found is not None
    assert (found.record.hex(), found.token, found.number) == (RECORD, (1 << 63) - 1, 1)


def test_a_field_that_http_does_not_carry_is_not_stored() -> None:
    _check_fields(oncegate.StoredResponse.of(201, {"Location": "/a\t\u00e9"}))
    for value in ("/a\r\nSet-Cookie: b", "a\0", "a\x7f"):
        with pytest.raises(oncegate.ConfigError, match="the header field location of the response has a character"):
            _check_fields(oncegate.StoredResponse.of(201, {"Location": value}))
    with pytest.raises(oncegate.ConfigError, match="is not the name of a header field"):
        _check_fields(oncegate.StoredResponse.of(201, {"a b": "c"}))
