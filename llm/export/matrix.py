"""Every mixer and hybrid in every form: ``python -m llm.export.matrix [--device cuda]`` compares them.

Small random models are exported and loaded through transformers in processes without the project. In fp32: the parity
that an export has to pass. In bf16: the error against fp64, of the export and of the model under autocast. On a GPU the
Triton kernels run, and models of flash-linear-attention where that is installed.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file

from llm.build import build_model
from llm.compose import compose
from llm.export.fla import fla_type
from llm.export.native import fitting
from llm.export.parity import (
    Parity,
    check_exports,
    make_cases,
    own_logits,
    relative,
    run_load_check,
    sample_text,
    supported,
    write_request,
)
from llm.export.table import layouts
from llm.export.write import write_flash_linear_attention, write_native, write_self_contained
from llm.model.decoder import Decoder
from llm.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SIZES = ["model=tiny", "model.d_model=64", "model.head_dim=16", "model.linear_head_dim=16", "model.parameters=200000"]
LENGTHS = (1, 65, 130)
LIMIT = 4  # times the model's own error


def make_exports(folder: Path, tokenizer: PreTrainedTokenizerBase, *, fla: bool) -> dict[str, tuple[Path, Decoder]]:
    """ "layout form" -> folder and model: every layout with its own code and, where it fits, natively and for fla."""
    found = {}
    for layout in layouts():
        config = compose([f"mixer={layout}", *SIZES, "model.init_std=0.04"])
        model = build_model(config, len(tokenizer)).eval()
        write_self_contained(folder / f"{layout} code", model, tokenizer, config)
        found[f"{layout} code"] = folder / f"{layout} code", model
        architecture, _ = fitting(model)
        if architecture is not None:
            name = f"{layout} {architecture.model_type}"
            write_native(folder / name, model, tokenizer, config, architecture)
            found[name] = folder / name, model
        if fla and fla_type(model)[0]:
            write_flash_linear_attention(folder / f"{layout} fla", model, tokenizer, config)
            found[f"{layout} fla"] = folder / f"{layout} fla", model
    return found


def bf16_errors(
    exports: dict[str, tuple[Path, Decoder]], tokenizer: PreTrainedTokenizerBase, sys_path: Sequence[str], device: str
) -> dict[str, tuple[float, float]]:
    """Largest error of logits against fp64, as a share of the largest logit: of each export, and of its model."""
    every_case = make_cases(tokenizer, sample_text(), LENGTHS)
    cases = {name: supported(every_case, path) for name, (path, _) in exports.items()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text.txt").write_text("")
        paths = {name: path for name, (path, _) in exports.items()}
        write_request(folder, paths, cases, sys_path, "bfloat16", device)
        run_load_check(folder)
        answers = {name: load_file(folder / f"{name}.answer.safetensors") for name in exports}
    errors = {}
    for name, (_, model) in exports.items():
        wide, theirs, ours = copy.deepcopy(model).double(), 0.0, 0.0
        for case in cases[name].keys() - {"prompt"}:
            exact = own_logits(wide, **cases[name][case])
            theirs = max(theirs, relative(answers[name][f"logits.{case}"].double(), exact))
            with torch.autocast("cpu", torch.bfloat16):
                ours = max(ours, relative(own_logits(model, **cases[name][case]).double(), exact))
        errors[name] = theirs, ours
    return errors


def lines(parities: dict[str, Parity], errors: dict[str, tuple[float, float]]) -> list[str]:
    """The table in Markdown."""
    yes = lambda flag: "yes" if flag else "NO"  # noqa: E731
    head = ["layout", "form", "fp32", "own fp32", "cache", "cached == uncached", "padded == alone", "bf16", "own bf16"]
    rows = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for name, p in parities.items():
        stepped = "none" if p.stepped is None else f"{p.stepped:.0e}"
        numbers = [f"{p.logits:.0e}", f"{p.own_error:.0e}", stepped]
        flags = [yes(p.cached_equals_uncached), yes(p.padded_equals_alone)]
        rows.append(f"| {' | '.join([*name.split(), *numbers, *flags, *(f'{e:.0e}' for e in errors[name])])} |")
    return rows


def main(words: Sequence[str] | None = None) -> int:
    """Print the table. Returns 1 where an export fails, or is less exact in bf16 than it should be."""
    parser = argparse.ArgumentParser(prog="python -m llm.export.matrix", description=__doc__)
    parser.add_argument("--transformers", metavar="FOLDER", help="use the transformers that pip put here (--target)")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="where the exports run")
    options = parser.parse_args(words)
    sys_path = [folder for folder in [options.transformers] if folder]
    fla = options.device == "cuda" and importlib.util.find_spec("fla") is not None
    tokenizer = load_tokenizer("bundled:tokenizer")
    with tempfile.TemporaryDirectory() as name:
        exports = make_exports(Path(name), tokenizer, fla=fla)
        paths, models = ({name: pair[i] for name, pair in exports.items()} for i in (0, 1))
        parities = check_exports(paths, models, tokenizer, lengths=LENGTHS, sys_path=sys_path, device=options.device)
        errors = bf16_errors(exports, tokenizer, sys_path, options.device)
    print("\n".join(lines(parities, errors)))
    failed = [f"{name}: {what}" for name, parity in parities.items() for what in parity.failures()]
    failed += [f"{name}: bf16 error {e:.1e}, own {own:.1e}" for name, (e, own) in errors.items() if e > LIMIT * own]
    print("\n".join(f"FAILED {what}" for what in failed), file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
