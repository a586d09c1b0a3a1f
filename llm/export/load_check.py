"""Run exports through transformers alone: ``python -I load_check.py FOLDER``, in a process without the project.

A script of its own: it imports torch, transformers and safetensors, and makes sure that the project and what only it
needs cannot be imported. FOLDER holds ``request.json``

    {"blocked": [module, ...], "sys_path": [folder, ...], "threads": n,
     "exports": {name: {"path", "cache", "dtype", "imports": [module, ...], "device"}}}

for each export ``NAME.request.safetensors``, with int64 [B, T] tensors ``CASE.input_ids`` and, where wanted,
``CASE.position_ids`` (the case ``prompt`` is continued instead), and ``text.txt``. Written are, for each export,
``NAME.answer.safetensors``: logits of the cases and what is generated from the prompt in several ways, and
``NAME.tokens.json``: text.txt through its tokenizer.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

NEW_TOKENS = 8


def answer(model: Any, request: dict[str, Any], *, cache: bool) -> dict[str, Any]:
    """Logits of the cases, logits through the cache if there is one, and what is generated, as tensors by name."""
    import torch

    prompt = request.pop("prompt.input_ids")
    cases: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in request.items():
        name, _, argument = key.rpartition(".")
        cases.setdefault(name, {})[argument] = tensor
    found = {f"logits.{name}": model(**inputs, use_cache=False).logits for name, inputs in cases.items()}
    settings = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
    for name, beams in {"greedy": 1, "beams": 3}.items():
        for suffix, use_cache in {"": cache, "_uncached": False}.items():
            found[name + suffix] = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), num_beams=beams, use_cache=use_cache, **settings
            )
    found["padded"], found["alone"] = padded_and_alone(model, prompt, settings)
    if cache:
        found["stepped_logits"] = stepped_logits(model, found["greedy"], prompt.shape[1])
    found["whole_logits"] = model(found["greedy"], use_cache=False).logits
    return {name: tensor.contiguous() for name, tensor in found.items()}


def padded_and_alone(model: Any, prompt: Any, settings: dict[str, Any]) -> tuple[Any, Any]:
    """What follows prompts of different lengths: as one batch, padded on the left, and each by itself."""
    import torch

    row, index = (torch.arange(n, device=prompt.device) for n in prompt.shape)
    pad = row[:, None] * 2 % prompt.shape[1]  # 0, 2, 4, ... tokens fewer
    mask = (index >= pad).long()
    ids = prompt.where(mask.bool(), model.generation_config.pad_token_id)
    padded = model.generate(ids, attention_mask=mask, **settings)[:, prompt.shape[1] :]
    rows = [row[None, skip:] for row, skip in zip(prompt, pad[:, 0].tolist(), strict=True)]
    alone = [model.generate(row, attention_mask=torch.ones_like(row), **settings)[:, row.shape[1] :] for row in rows]
    return padded, torch.cat(alone)


def stepped_logits(model: Any, tokens: Any, first: int) -> Any:
    """Logits of rows of tokens: `first` tokens in one pass, three in a second, then one by one."""
    import torch

    spans = [(0, first), (first, first + 3), *((t, t + 1) for t in range(first + 3, tokens.shape[1]))]
    cache, found = None, []
    for begin, end in spans:
        output = model(tokens[:, begin:end], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        found.append(output.logits)
    return torch.cat(found, dim=1)


def main(folder: Path) -> None:
    request = json.loads((folder / "request.json").read_text())
    for name in request["blocked"]:
        sys.modules[name] = None  # importing it fails, whatever is installed
    sys.path[:0] = request["sys_path"]
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(request["threads"])
    text = (folder / "text.txt").read_text(encoding="utf-8")
    for module in {module for export in request["exports"].values() for module in export["imports"]}:
        importlib.import_module(module)
    models = {
        name: AutoModelForCausalLM.from_pretrained(export["path"], trust_remote_code=True, dtype=export["dtype"])
        for name, export in request["exports"].items()
    }
    with torch.inference_mode():
        for name, model in models.items():
            export = request["exports"][name]
            asked = load_file(folder / f"{name}.request.safetensors", device=export["device"])
            answered = answer(model.eval().to(export["device"]), asked, cache=export["cache"])
            save_file(answered, folder / f"{name}.answer.safetensors")
            tokenizer = AutoTokenizer.from_pretrained(export["path"], trust_remote_code=True)
            ids = tokenizer(text, verbose=False)["input_ids"]
            (folder / f"{name}.tokens.json").write_text(json.dumps(ids))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
