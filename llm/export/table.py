"""Which mixers and settings transformers can hold natively: the table of docs/export.md, made from what is there.

python -m llm.export.table           # print it
python -m llm.export.table --write   # put it into docs/export.md
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from llm.build import build_model
from llm.compose import compose
from llm.config import TrainConfig
from llm.errors import UserError
from llm.export.fla import fla_type
from llm.export.native import fitting, has_cache
from llm.paths import configs_dir

SIZES = ["model=tiny", "model.mlp_width=64"]
BEGIN, END = "<!-- made by python -m llm.export.table --write -->", "<!-- end -->"
Row = tuple[str, str, str]


def rows() -> Iterator[Row]:
    """(layout, settings, what it is exported as): every layout, then each setting that changes that."""
    for layout in layouts():
        config = compose([f"mixer={layout}", *SIZES])
        usual = outcome(config)
        yield layout, "defaults", usual
        by_outcome: dict[str, list[str]] = {}
        for name, settings in config.mixers.items():
            for key, value in settings.items():
                for other in variations(value):
                    found = outcome_with(config, name, key, other)
                    if found not in (None, usual):
                        by_outcome.setdefault(found, []).append(f"{name}.{key}={yaml.safe_dump(other).split()[0]}")
        for found, changed in by_outcome.items():
            yield "", ", ".join(f"`{setting}`" for setting in changed), found


def layouts() -> list[str]:
    """Every mixer, then every mixer among softmax layers."""
    contents = {p.stem: yaml.safe_load(p.read_text()) for p in sorted((configs_dir() / "mixer").glob("*.yaml"))}
    names = [name for name, content in contents.items() if name in content.get("mixers", {})]
    return [*names, *(f"hybrid_{name}_3to1" for name in names if name != "softmax")]


def variations(value: Any) -> list[Any]:
    """Other values of a setting that may matter."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [None, value / 2 if isinstance(value, float) else value * 2]
    return [2, -5.0] if value is None else []


def outcome(config: TrainConfig) -> str:
    """The architecture of transformers, or what stands in its way."""
    model = build_model(config, 128, device="meta")
    architecture, reason = fitting(model)
    if architecture is None:
        found = f"self-contained: {reason}"
    elif has_cache(model):
        found = architecture.model_type
    else:
        found = f"self-contained; {architecture.model_type} without cache"
    theirs, _ = fla_type(model)
    return f"{found}; fla {theirs.model_type}" if theirs else found


def outcome_with(config: TrainConfig, mixer: str, key: str, value: Any) -> str | None:
    """The outcome with another value of one setting; None if the mixer does not take it."""
    other = copy.deepcopy(config)
    other.mixers[mixer][key] = value
    try:
        return outcome(other)
    except UserError:
        return None


def table() -> str:
    """The rows in Markdown."""
    lines = ["| layout | settings | exported as |", "| --- | --- | --- |"]
    return "\n".join(
        [*lines, *(f"| {layout and f'`{layout}`'} | {what} | {found} |" for layout, what, found in rows())]
    )


def page() -> Path:
    """The page that holds the table."""
    return configs_dir().parent / "docs" / "export.md"


def with_table(text: str, made: str) -> str:
    """A page's text with `made` between the marks."""
    head, rest = text.split(BEGIN)
    return f"{head}{BEGIN}\n{made}\n{END}{rest.split(END)[1]}"


def main(words: Sequence[str]) -> int:
    if "--write" in words:
        page().write_text(with_table(page().read_text(), table()))
    else:
        print(table())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
