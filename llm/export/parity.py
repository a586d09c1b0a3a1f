"""Whether an export computes what the model does: both are run on the same tokens, the export without the project."""

from __future__ import annotations

import copy
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from llm.export import load_check
from llm.export.bundle import OWN
from llm.export.fla import TYPES
from llm.generate import generate
from llm.model.decoder import Decoder
from llm.paths import data_dir
from mixer_kernels import Segments

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOLERANCE = 1e-4  # of the largest logit
ERRORS = 4  # times the model's own fp32 error
LENGTHS = (1, 2, 63, 64, 65, 257, 2049)
FP64_TOKENS = 512  # longer rows are not run in fp64
Cases = dict[str, dict[str, Tensor]]
BLOCKED = (*OWN, "hydra", "omegaconf", "accelerate")


@dataclass(frozen=True)
class Parity:
    """Differences between a model and its export; logits as shares of the largest logit, all in fp32.

    `own_error` is that of the model in fp32 against fp64; it, and `short_rows`, are of the rows up to `FP64_TOKENS`.
    `stepped` (logits through the cache) is None for an export that is decoded without one.
    """

    logits: float
    short_rows: float
    own_error: float
    stepped: float | None
    same_continuation: bool
    cached_equals_uncached: bool
    padded_equals_alone: bool
    same_tokens: bool

    def failures(self) -> list[str]:
        """What is wrong, in words; empty if the export is good."""
        found = {
            f"logits differ by {self.logits:.1e} of the largest, more than {TOLERANCE}": self.logits > TOLERANCE,
            f"logits differ by {self.short_rows:.1e} of the largest, more than {ERRORS} times the model's own fp32 "
            f"error of {self.own_error:.1e}": self.short_rows > ERRORS * self.own_error,
            f"logits through the cache differ by {self.stepped} of the largest": (self.stepped or 0) > TOLERANCE,
            "greedy continuation differs from the model's own": not self.same_continuation,
            "continuation with cache differs from that without": not self.cached_equals_uncached,
            "continuation of a left-padded batch differs from that of its rows": not self.padded_equals_alone,
            "the tokenizer cuts text differently": not self.same_tokens,
        }
        return [what for what, failed in found.items() if failed]

    def __str__(self) -> str:
        yes = lambda flag: "yes" if flag else "NO"  # noqa: E731
        cached = "without a cache" if self.stepped is None else f"through the cache {self.stepped:.1e}"
        return (
            f"logits differ by {self.logits:.1e} of the largest (the model's own fp32 error: {self.own_error:.1e}), "
            f"{cached}; same continuation: {yes(self.same_continuation)}, "
            f"cached == uncached: {yes(self.cached_equals_uncached)}, "
            f"padded == alone: {yes(self.padded_equals_alone)}, same tokens: {yes(self.same_tokens)}"
        )


def check_exports(
    exports: Mapping[str, Path],
    models: Mapping[str, Decoder],
    tokenizer: PreTrainedTokenizerBase,
    *,
    lengths: Sequence[int] = LENGTHS,
    sys_path: Sequence[str] = (),
    device: str = "cpu",
) -> dict[str, Parity]:
    """The parity of several exports, all loaded in one fresh process that cannot import the project.

    `lengths` of rows of random tokens; `sys_path`: folders before all others there, as of another transformers. The
    exports run on `device`, the models on the CPU.
    """
    text = sample_text()
    every_case = make_cases(tokenizer, text, lengths)
    cases = {name: supported(every_case, path) for name, path in exports.items()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text.txt").write_text(text, encoding="utf-8")
        write_request(folder, exports, cases, sys_path, device=device)
        run_load_check(folder)
        ids = tokenizer(text, verbose=False)["input_ids"]
        return {
            export: compare(
                models[export],
                cases[export],
                load_file(folder / f"{export}.answer.safetensors"),
                end=tokenizer.eos_token_id,
                same_tokens=ids == json.loads((folder / f"{export}.tokens.json").read_text()),
            )
            for export in exports
        }


def write_request(
    folder: Path,
    exports: Mapping[str, Path],
    cases: Mapping[str, Cases],
    sys_path: Sequence[str] = (),
    dtype: str = "float32",
    device: str = "cpu",
) -> None:
    """What `load_check` reads."""
    settings = {
        "blocked": sorted({*BLOCKED, *itertools.chain.from_iterable(map(_own_packages, exports.values()))}),
        "sys_path": [*sys_path, *_homes(exports.values())],
        "threads": torch.get_num_threads(),
        "exports": {
            name: {"path": str(path.resolve()), "dtype": dtype, **_how_to_run(path, device)}
            for name, path in exports.items()
        },
    }
    (folder / "request.json").write_text(json.dumps(settings))
    for export in exports:
        tensors = {f"{case}.{arg}": x for case, inputs in cases[export].items() for arg, x in inputs.items()}
        save_file(tensors, folder / f"{export}.request.safetensors")


def sample_text() -> str:
    """Some held-out prose, with characters beyond ASCII."""
    with (data_dir() / "val.jsonl").open(encoding="utf-8") as lines:
        return "Naïve façade: 1 € ≈ 日本語.\n" + json.loads(next(lines))["text"][:20_000]


def make_cases(tokenizer: PreTrainedTokenizerBase, text: str, lengths: Sequence[int]) -> dict[str, dict[str, Tensor]]:
    """Inputs by case: random rows, packed documents of text, and a prompt [3, 9]."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randint(len(tokenizer), shape, generator=generator)  # noqa: E731
    cases = {f"random_{n}": {"input_ids": draw(2 if n < 100 else 1, n)} for n in lengths}
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"][:300])
    position, documents = torch.arange(len(ids)), torch.tensor([0, 1, 3, 40, 64, 200])
    start = documents[torch.searchsorted(documents, position, right=True) - 1]
    cases["text"] = {"input_ids": ids[None].clone()}
    cases["packed"] = {"input_ids": ids[None], "position_ids": (position - start)[None]}
    cases["prompt"] = {"input_ids": torch.stack([ids[:9], ids[50:59], draw(9)])}
    return cases


def compare(
    model: Decoder,
    cases: Cases,
    answer: Mapping[str, Tensor],
    *,
    end: int,
    same_tokens: bool,
) -> Parity:
    """The parity of a model and the answers that its export gave; `end` is the end of document, not generated."""
    prompt, wide = cases["prompt"]["input_ids"], copy.deepcopy(model).double()
    difference = short_rows = own_error = 0.0
    for name, inputs in cases.items():
        if name == "prompt":
            continue
        ours = own_logits(model, **inputs)
        found = relative(answer[f"logits.{name}"], ours)
        difference = max(difference, found)
        if ours.shape[1] <= FP64_TOKENS:
            short_rows = max(short_rows, found)
            own_error = max(own_error, relative(ours, own_logits(wide, **inputs)))
    new = answer["greedy"][:, prompt.shape[1] :]
    going_on = lambda logits_BW: logits_BW.index_fill(1, torch.tensor(end), -torch.inf).argmax(-1)  # noqa: E731
    ours = [list(generate(model, row.tolist(), max_new_tokens=new.shape[1], choose=going_on)) for row in prompt]
    return Parity(
        logits=difference,
        short_rows=short_rows,
        own_error=own_error,
        stepped=relative(answer["stepped_logits"], answer["whole_logits"]) if "stepped_logits" in answer else None,
        same_continuation=new.tolist() == ours,
        cached_equals_uncached=all(answer[way].equal(answer[f"{way}_uncached"]) for way in ("greedy", "beams")),
        padded_equals_alone=answer["padded"].equal(answer["alone"]),
        same_tokens=same_tokens,
    )


@torch.inference_mode()
def own_logits(model: Decoder, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
    """[B, T, W]; position 0 begins a document."""
    segments = None if position_ids is None else Segments.from_starts(position_ids == 0)
    return model.logits(model(input_ids, segments).hidden)


def relative(got: Tensor, expected: Tensor) -> float:
    """The largest difference, as a share of the largest value; infinite where something is not a number."""
    share = (got - expected).abs().amax() / expected.abs().amax()
    return share.item() if share.isfinite() else float("inf")


def _config(export: Path) -> dict:
    return json.loads((export / "config.json").read_text())


def _how_to_run(export: Path, device: str) -> dict:
    """What an export needs besides transformers: flash-linear-attention's models a GPU, and itself imported."""
    config = _config(export)
    theirs = config["model_type"] in {t.model_type for t in TYPES}
    where = {"imports": ["fla"], "device": "cuda"} if theirs else {"imports": [], "device": device}
    return {"cache": config.get("use_cache", True), **where}


def _homes(exports: Iterable[Path]) -> set[str]:
    """Folders of the packages that exports import: the fresh process knows no PYTHONPATH."""
    modules = {module for export in exports for module in _how_to_run(export, "cpu")["imports"]}
    return {str(Path(spec.origin).parents[1]) for m in modules if (spec := importlib.util.find_spec(m)) is not None}


def supported(cases: Cases, export: Path) -> Cases:
    """Without packed documents, unless our own code is what reads them."""
    packs = "auto_map" in _config(export)
    return {name: inputs for name, inputs in cases.items() if packs or "position_ids" not in inputs}


def _own_packages(export: Path) -> set[str]:
    """First parts of the names of the classes in an export's configuration: modules that it must not need."""
    return {settings["_target_"].split(".")[0] for settings in _config(export).get("mixers", {}).values()}


def run_load_check(folder: Path) -> None:
    """Let a fresh process answer the requests in `folder`. RuntimeError where an export does not load."""
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_MODULES_CACHE": str(folder / "modules"),  # the code of exports is copied there
        "TOKENIZERS_PARALLELISM": "false",
        "TRITON_F32_DEFAULT": "ieee",  # fp32 is compared: no tf32 in others' kernels
    }
    command = [sys.executable, "-I", load_check.__file__, str(folder)]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the export does not load through transformers:\n{done.stderr[-3000:]}")
