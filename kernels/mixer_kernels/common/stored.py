"""The committed launch configurations. A copy of this package inside an exported model has them in a module instead."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any


def stored_configurations(op: str) -> dict[str, Any]:
    """What is in the operator's `configs.json`."""
    return json.loads(resources.files(f"mixer_kernels.{op}").joinpath("configs.json").read_text())
