"""The data that all libraries share: profiles, conditions, signals of services, scripts of Redis."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any


@cache
def contract() -> dict[str, Any]:
    text = resources.files(__package__).joinpath("contract.json").read_text(encoding="utf-8")
    data: dict[str, Any] = json.loads(text)
    return data


@cache
def conditions() -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in contract()["conditions"]}
