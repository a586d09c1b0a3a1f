"""Classes by the dotted name that `_target_` gives. An export has a table of its mixers in this module's place."""

from __future__ import annotations

import importlib


def find_class(target: str) -> type:
    """The class `target`, like "package.module.Class"."""
    module, _, name = target.rpartition(".")
    return getattr(importlib.import_module(module), name)
