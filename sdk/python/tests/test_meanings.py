"""The meaning of each response to a client, by the shared vectors."""

from __future__ import annotations

from typing import Any

import pytest

from conftest import vectors
from oncegate.verdict import Context, judge

TABLE = vectors("client/vectors/meanings.json")


@pytest.mark.parametrize("case", TABLE["responses"], ids=lambda case: repr(case["name"]))
def test_meanings(case: dict[str, Any]) -> None:
    headers = [(name, value.encode("latin-1")) for name, value in case["headers"]]
    for own in TABLE["contexts"]:
        context = Context(own["protection"], own["server_errors"], own["in_doubt"])
        expected = [meaning for times, meaning in case["meanings"][own["name"]] for _ in range(times)]
        found = [judge(context, status, headers, case["body"].encode()) for status in TABLE["statuses"]]
        assert found == expected, own["name"]
