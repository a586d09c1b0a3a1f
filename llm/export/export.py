"""From a run to a folder that others load: written aside, checked in a fresh process, then renamed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from llm.durable import TEMPORARY
from llm.errors import UserError
from llm.export.parity import Parity, check_exports
from llm.export.write import write_export
from llm.runs import load_run


def export_run(run: Path | str, out: Path | str, *, step: int | None = None) -> Parity:
    """Export the model of a run after `step` (None: the newest checkpoint) to the new folder `out`.

    Returns how it compares with the model. Raises UserError, and leaves no folder, where `out` exists, the run cannot
    be read, or the export differs from the model.
    """
    out = Path(out)
    if out.exists():
        raise UserError(f"{out} exists and is not overwritten. Choose another folder, or remove it.")
    model, tokenizer, config = load_run(run, step)
    aside = out.parent / f"{TEMPORARY}{out.name}-{os.getpid()}"
    try:
        write_export(aside, model, tokenizer, config)
        parity = check_exports({"export": aside}, {"export": model}, tokenizer)["export"]
        if parity.failures():
            raise UserError(f"the export differs from the model and is not kept: {'; '.join(parity.failures())}.")
        aside.rename(out)
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror or error}).") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return parity
