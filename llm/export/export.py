"""From a run to a folder that others load: written aside, checked in a fresh process, then renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from llm.durable import TEMPORARY
from llm.errors import UserError
from llm.export.card import write_card
from llm.export.native import fitting, has_cache
from llm.export.parity import Parity, check_exports
from llm.export.write import write_native, write_self_contained
from llm.model.decoder import Decoder
from llm.runs import checkpoint_folder, load_run

FORMATS = ("auto", "native", "self-contained")


def export_run(
    run: Path | str,
    out: Path | str,
    *,
    step: int | str | None = None,
    form: str = "auto",
    licence: str | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Parity:
    """Export the model of a run after `step` (as for `load_run`) to the new folder `out`.

    `form` is "native" (an architecture of transformers), "self-contained" (with our code) or "auto": native where that
    loses nothing and decodes with a cache. `licence` goes into the model card. `say` is told what is going on.

    Returns how the export compares with the model. Raises UserError, and leaves no folder, where `out` exists, the run
    cannot be read, no native architecture fits though one was asked for, or the export differs from the model.
    """
    out = Path(out)
    if out.exists():
        raise UserError(f"{out} exists and is not overwritten. Choose another folder, or remove it.")
    model, tokenizer, config = load_run(run, step)
    architecture, reason = fitting(model)
    form = choose_form(form, model, reason)
    aside = out.parent / f"{TEMPORARY}{out.name}-{os.getpid()}"
    try:
        if form == "native":
            say(f"writing it as transformers' own {architecture.model_type}")
            write_native(aside, model, tokenizer, config, architecture)
        else:
            say("writing it with its own code")
            write_self_contained(aside, model, tokenizer, config)
        say("comparing it with the model, loaded through transformers in a process without the project")
        parity = check_exports({"export": aside}, {"export": model}, tokenizer)["export"]
        if parity.failures():
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
    if form == "auto":
        return "native" if not reason and has_cache(model) else "self-contained"
    return form


def how_to_load(out: Path | str) -> str:
    """What to type next."""
    own_code = any(Path(out).glob("modeling_*.py"))
    arguments = f"{str(out)!r}, trust_remote_code=True" if own_code else repr(str(out))
    return (
        f"{out}: ready. torch and transformers are all that it needs:\n"
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
