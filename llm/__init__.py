"""A laboratory for token mixers: small language models whose mixer is one word on the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llm.runs import load_run

__all__ = ["load_run"]


def __getattr__(name: str) -> Any:
    """`load_run`, imported when it is asked for: `import llm` costs nothing."""
    if name == "load_run":
        from llm.runs import load_run

        return load_run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
