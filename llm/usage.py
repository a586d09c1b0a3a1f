"""The text of ``python -m llm.train --help``, made from the configs and the typed configuration."""

from __future__ import annotations

import dataclasses
import typing

from omegaconf import MISSING

from llm.compose import groups
from llm.config import TrainConfig
from llm.sweep.settings import SweepConfig

HEAD = """usage: python -m llm.train [-m] [group=choice ...] [key=value ...]

Train a language model. The same command finds its run again and goes on where it stopped.

  python -m llm.train experiment=quickstart
  python -m llm.train mixer=hybrid_gdn_3to1 model=340m data=local data.path=texts/ tokenizer=folder tokenizer.path=tok/
  python -m llm.train mixer=kda mixers.kda.conv_size=3 dry_run=true
  python -m llm.train -m mixer=gdn,kda seed=1,2,3
  python -m llm.train -m sweep=hybrid_ratios_340m n_gpus=8 dry_run=true

-m trains every combination of comma-separated values, each in processes of its own.
mixer=hybrid_X_Nto1 is N layers of mixer X to each softmax layer; pattern=[gdn,gdn,softmax] is a layout of your own.
"""


def usage() -> str:
    """Groups with their choices, then every key with its default and meaning."""
    lines = [HEAD, "groups", *_choices(groups())]
    lines += ["", "keys (= default of the schema; groups and experiments set others)", *_keys(TrainConfig, "  ", "")]
    lines += ["", "groups of sweeps (with -m)", *_choices(groups(of_sweeps=True))]
    lines += ["", "keys of sweeps (with -m)", *_keys(SweepConfig, "  ", "")]
    return "\n".join(lines)


def _choices(found: dict[str, list[str]]) -> list[str]:
    return [f"  {name:<12} {', '.join(choices)}" for name, choices in found.items()]


def _keys(schema: type, indent: str, prefix: str) -> list[str]:
    lines, nested, types = [], [], typing.get_type_hints(schema)
    for field in dataclasses.fields(schema):
        if dataclasses.is_dataclass(types[field.name]):
            nested += _keys(types[field.name], indent, f"{prefix}{field.name}.")
        else:
            lines.append(f"{indent}{prefix + field.name + _default(field):<38} {field.metadata['help']}")
    return lines + nested


def _default(field: dataclasses.Field) -> str:
    value = field.default if field.default is not dataclasses.MISSING else field.default_factory()
    if value == MISSING:
        return "="
    return "=" + {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))
