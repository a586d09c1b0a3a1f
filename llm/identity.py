"""Which settings make a run the run that it is, and the folder name that follows from them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llm.config import TrainConfig
from llm.layout import layer_names

SCHEMA_VERSION = 1  # of config.yaml in a run folder
SWEEP_VARIABLE = "MIXLAB_SWEEP"  # names the sweep in the environment of its jobs


def identity(config: TrainConfig) -> dict[str, Any]:
    """The settings that decide a run's result, flat and dotted; how it is run, watched and saved is left out.

    A field is left out by ``option(..., free=True)`` in llm/config.py.
    """
    return dict(_flatten(config, ""))


def differences(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """'key: theirs -> mine' for every setting in which two identities differ."""
    absent = "(absent)"
    keys = sorted({*mine, *theirs})
    return [
        f"{key}: {theirs.get(key, absent)} -> {mine.get(key, absent)}"
        for key in keys
        if mine.get(key, absent) != theirs.get(key, absent)
    ]


def default_run_dir(config: TrainConfig) -> Path:
    """runs/<size>-<mixers>-<data>-<hash of all settings that matter>: the same command finds the same folder."""
    text = json.dumps(identity(config), sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return Path("runs") / f"{config.model.name}-{mixer_label(config)}-{config.data.name}-{digest}"


def mixer_label(config: TrainConfig) -> str:
    """'gdn', 'hybrid_gdn_3to1', or 'gdn+kda+softmax' for a literal pattern."""
    hybrid = config.hybrid
    if hybrid.per_softmax is None:
        return "+".join(dict.fromkeys(layer_names(config)))
    other = "" if hybrid.softmax == "softmax" else f"_{hybrid.softmax}"
    return f"hybrid_{hybrid.linear}{other}_{hybrid.per_softmax}to1"


def _flatten(node: Any, prefix: str) -> list[tuple[str, Any]]:
    if dataclasses.is_dataclass(node):
        kept = [f.name for f in dataclasses.fields(node) if not f.metadata.get("free")]
        items = [(name, getattr(node, name)) for name in kept]
    elif isinstance(node, Mapping):
        items = list(node.items())
    else:
        return [(prefix.removesuffix("."), node)]
    return [pair for name, value in items for pair in _flatten(value, f"{prefix}{name}.")]
