"""The store in memory decides as every other store does, by the shared vectors."""

from __future__ import annotations

from typing import Any

import pytest

from conftest import vectors
from oncegate import decide


def data(text: str | None) -> bytes | None:
    return None if text is None else bytes.fromhex(text)


def shown(record: decide.Record | None) -> Any:
    if record is None:
        return None
    out: dict[str, Any] = {
        "attempts": record.attempts,
        "by_operator": record.by_operator,
        "caller": record.caller.hex(),
        "changed_at": record.changed_at,
        "created_at": record.created_at,
        "expires_at": record.expires_at,
        "fingerprint": record.fingerprint.hex(),
        "key_tag": None if record.key_tag is None else record.key_tag.hex(),
        "operation": record.operation,
        "state": record.state,
        "steps": [[name, result.hex()] for name, result in record.steps],
        "token": record.token,
    }
    if record.state == "in-progress":
        out |= {
            "attempt": record.attempt.hex(),
            "lease_until": record.lease_until,
            "after_abandoned": record.after_abandoned,
        }
    if record.response is not None:
        out["response"] = record.response.hex()
    return out


BYTES = {"attempt", "fingerprint", "caller", "key_tag", "response", "result"}
NOT_DECIDED = {"command", "now", "expect", "record", "actor", "reason"}


@pytest.mark.parametrize("walk", vectors("core/vectors/decisions.json")["walks"])
def test_walks(walk: list[dict[str, Any]]) -> None:
    record: decide.Record | None = None
    for command in walk:
        arguments = {
            name: data(value) if name in BYTES else value for name, value in command.items() if name not in NOT_DECIDED
        }
        outcome, new = getattr(decide, command["command"])(record, command["now"], **arguments)
        record = new or record
        if isinstance(outcome.get("response"), bytes):
            outcome["response"] = outcome["response"].hex()
        assert outcome == command["expect"]
        assert shown(record) == command["record"]
