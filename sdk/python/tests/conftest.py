from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CRATES = Path(__file__).resolve().parents[3] / "crates"


def vectors(path: str) -> Any:
    return json.loads((CRATES / path).read_text(encoding="utf-8"))


def settings_of(configuration: dict[str, Any]) -> Any:
    """Settings from the names of the sidecar's configuration."""
    from oncegate.settings import Settings

    return Settings.of(**{name.replace("-", "_").replace(".", "_"): value for name, value in configuration.items()})
