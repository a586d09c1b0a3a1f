"""The page about all mixers, docs/mixers.md, written from the mixers themselves."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import yaml

from llm.build import build_mixer
from llm.compose import compose
from llm.config import ModelConfig
from llm.mixers.base import TokenMixer
from llm.paths import configs_dir
from llm.report import human_bytes
from llm.sizing import mlp_width

SIZE, CONTEXT = "340m", 4096
# what was measured on a GPU: {"note": how, "mixers": {name: {column: figure}}}
MEASURED = Path(__file__).parent.parent / "docs" / "mixers_measured.json"
INTRODUCTION = f"""# Mixers

Written by `python scripts/describe_mixers.py` from the classes in `llm/mixers/` and the files in `configs/mixer/`; a
test holds it to them. `mixer=NAME` trains a stack of one, `mixer=hybrid_NAME_3to1` three layers of it to one of
softmax attention, `pattern=[NAME,OTHER]` any layout. With any of them `residual=delta_attention` and
`residual=value_routing` change what goes from layer to layer (`llm/model/residual.py`).

K, V are key and value size of a head, S its state, [K, V]; g a logarithm of a decay. At `model={SIZE}`: state of all
layers of one sequence after {CONTEXT:,} tokens with bf16 activations; FLOPs of one layer's mixer for a token, forward,
in documents of {CONTEXT:,} tokens; the MLP's width, with which all have the same parameters.
"""


@dataclass
class Entry:
    """A mixer as configs/mixer has it."""

    name: str
    settings: dict[str, Any]
    mixer: TokenMixer
    sizes: ModelConfig

    @cached_property
    def text(self) -> str:
        """The class's docstring."""
        return inspect.cleandoc(type(self.mixer).__doc__ or "")

    @property
    def title(self) -> str:
        """The docstring of the class's module, which says the mixer's name."""
        return (inspect.getmodule(type(self.mixer)).__doc__ or self.name).strip().splitlines()[0].rstrip(".")

    @property
    def recurrence(self) -> str:
        """The first formula of the docstring."""
        found = re.search(r"``(.+?)``", self.text, re.DOTALL)
        return f"`{' '.join(found[1].split())}`" if found else ""

    @property
    def operator(self) -> str:
        """What computes it: an operator of `mixer_kernels`, or torch's attention."""
        parts = [m for m in self.mixer.modules() if isinstance(m, TokenMixer)]
        found = [
            getattr(type(part), "operator", None) for part in parts[1:] or parts
        ]  # of a hybrid's parts, or its own
        return " and ".join(operator.__name__ if operator else "softmax attention" for operator in found)

    def figures(self) -> list[str]:
        """State bytes of all layers, FLOPs of one layer for a token, MLP width."""
        mixer, layers = self.mixer, self.sizes.n_layers
        flops = mixer.flops(CONTEXT, CONTEXT**2) / CONTEXT
        state = human_bytes(layers * mixer.state_bytes(CONTEXT))
        return [state, f"{flops / 1e6:.1f}M", str(mlp_width(self.sizes, [mixer] * layers))]


def entries() -> list[Entry]:
    """All mixers with settings of their own, by name."""
    found = []
    for path in sorted((configs_dir() / "mixer").glob("*.yaml")):
        settings = yaml.safe_load(path.read_text(encoding="utf-8")).get("mixers", {}).get(path.stem)
        if settings is not None:
            config = compose([f"mixer={path.stem}", f"model={SIZE}"])
            with torch.device("meta"):
                mixer = build_mixer(config, path.stem, 1)
            found.append(Entry(path.stem, settings, mixer, config.model))
    return found


def page(found: list[Entry]) -> str:
    """The text of docs/mixers.md."""
    measured = json.loads(MEASURED.read_text(encoding="utf-8")) if MEASURED.exists() else {"note": "", "mixers": {}}
    introduction = [INTRODUCTION, *([measured["note"], ""] if measured["note"] else [])]
    return "\n".join([*introduction, *_table(found, measured["mixers"]), "", *_sections(found)])


def _table(found: list[Entry], measured: dict[str, dict[str, str]]) -> Iterator[str]:
    columns = list(dict.fromkeys(column for row in measured.values() for column in row))
    header = ["mixer", "computed by", "recurrence", "state", "FLOPs", "MLP", *columns]
    yield f"| {' | '.join(header)} |"
    yield f"|{' --- |' * len(header)}"
    for entry in found:
        figures = [*entry.figures(), *(measured.get(entry.name, {}).get(column, "") for column in columns)]
        link = f"[{entry.name}](#{entry.name})"
        yield f"| {link} | {entry.operator} | {entry.recurrence.replace('|', chr(92) + '|')} | {' | '.join(figures)} |"


def _sections(found: list[Entry]) -> Iterator[str]:
    described: dict[str, Entry] = {}
    for entry in sorted(found, key=lambda entry: len(entry.name)):  # a class is described under its shortest name
        described.setdefault(entry.settings["_target_"], entry)
    for entry in found:
        yield f"## {entry.name}\n"
        first, target = described[entry.settings["_target_"]], entry.settings["_target_"]
        if first is entry:
            source = f"llm/mixers/{target.split('.')[-2]}.py"
            yield f"{entry.title}: [`{target.rsplit('.', 1)[1]}`](../{source}).\n\n{entry.text}\n"
        else:
            changed = {k: v for k, v in entry.settings.items() if first.settings.get(k) != v}
            yield f"[{first.name}](#{first.name}) with {', '.join(f'`{k}={v}`' for k, v in changed.items())}.\n"
