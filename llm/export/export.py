"""From a run to a folder that others load: written aside, checked in a fresh process, then renamed."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from llm.durable import TEMPORARY
from llm.errors import UserError
from llm.export.card import write_card
from llm.export.fla import TYPES, fla_type
from llm.export.native import fitting, has_cache
from llm.export.parity import Parity, check_exports
from llm.export.write import write_flash_linear_attention, write_native, write_self_contained
from llm.model.decoder import Decoder
from llm.runs import checkpoint_folder, load_run

FORMATS = ("auto", "native", "self-contained", "fla")


def export_run(
    run: Path | str,
    out: Path | str,
    *,
    step: int | str | None = None,
    form: str = "auto",
    licence: str | None = None,
    check: bool = True,
    say: Callable[[str], None] = lambda line: None,
) -> Parity | None:
    """Export the model of a run after `step` (as for `load_run`) to the new folder `out`.

    `form` is "native" (an architecture of transformers), "self-contained" (with our code), "fla" (classes of
    flash-linear-attention, which are compared on a GPU) or "auto": native where that loses nothing and decodes with a
    cache. `licence` goes into the model card; `check` false leaves the comparison out; `say` is told what is going on.

    Returns how the export compares with the model, None if it was not compared. Raises UserError, and leaves no folder,
    where `out` exists, the run cannot be read, the form asked for does not fit, or the export differs from the model.
    """
    out = Path(out)
    if out.exists():
        raise UserError(f"{out} exists and is not overwritten. Choose another folder, or remove it.")
    model, tokenizer, config = load_run(run, step)
    architecture, reason = fitting(model)
    form = choose_form(form, model, reason)
    if form == "fla" and check:
        check_fla_runs()
    aside = out.parent / f"{TEMPORARY}{out.name}-{os.getpid()}"
    try:
        if form == "native":
            say(f"writing it as transformers' own {architecture.model_type}")
            write_native(aside, model, tokenizer, config, architecture)
        elif form == "fla":
            say("writing it for flash-linear-attention")
            write_flash_linear_attention(aside, model, tokenizer, config)
        else:
            say("writing it with its own code")
            write_self_contained(aside, model, tokenizer, config)
        parity = None
        if check:
            say("comparing it with the model, loaded through transformers in a process without the project")
            parity = check_exports({"export": aside}, {"export": model}, tokenizer)["export"]
        if parity and parity.failures():
            raise UserError(f"the export differs from the model and is not kept: {'; '.join(parity.failures())}.")
        exported_step = int(checkpoint_folder(Path(run), step).name.removeprefix("step_"))
        write_card(aside, Path(run), exported_step, model, config, parity, licence=licence)
        aside.rename(out)
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror or error}).") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return parity


def choose_form(form: str, model: Decoder, reason: str) -> str:
    """ "native" or "self-contained"; UserError for an unknown one, or for native where a `reason` is against it."""
    if form not in FORMATS:
        raise UserError(f"--format {form} is unknown. Known: {', '.join(FORMATS)}.")
    if form == "native" and reason:
        raise UserError(f"--format native: not possible for this model ({reason}). Use --format self-contained.")
    if form == "fla" and fla_type(model)[1]:
        raise UserError(f"--format fla: not possible for this model ({fla_type(model)[1]}). Use another --format.")
    if form == "auto":
        return "native" if not reason and has_cache(model) else "self-contained"
    return form


def check_fla_runs() -> None:
    """UserError where flash-linear-attention's models cannot run, so that the export could not be compared."""
    missing = [name for name in ("fla", "einops") if importlib.util.find_spec(name) is None]
    if missing or not torch.cuda.is_available():
        raise UserError(
            f"--format fla: to compare the export, flash-linear-attention and a GPU are needed ("
            f"{f'{missing[0]} is not installed' if missing else 'there is no GPU'}). "
            "Install flash-linear-attention on a machine with one, or give --unchecked."
        )


def how_to_load(out: Path | str) -> str:
    """What to type next."""
    own_code = any(Path(out).glob("modeling_*.py"))
    arguments = f"{str(out)!r}, trust_remote_code=True" if own_code else repr(str(out))
    theirs = json.loads((Path(out) / "config.json").read_text())["model_type"] in {t.model_type for t in TYPES}
    needed = "flash-linear-attention loads it" if theirs else "torch and transformers are all that it needs"
    return (
        f"{out}: ready. {needed}:\n"
        f"{'  import fla' + chr(10) if theirs else ''}"
        f"  model = AutoModelForCausalLM.from_pretrained({arguments})\n"
        f"  tokenizer = AutoTokenizer.from_pretrained({arguments})"
    )


def push(out: Path | str, name: str, *, private: bool) -> str:
    """Upload an export to a new repository of the hub. Returns its address; UserError where that fails."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi()
    try:
        address = api.create_repo(name, private=private)
        api.upload_folder(repo_id=name, folder_path=str(out))
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise UserError(
            f"--push-to-hub {name}: {str(error).strip().splitlines()[0]} The export is in {out}."
        ) from error
    return f"uploaded to {address}"
