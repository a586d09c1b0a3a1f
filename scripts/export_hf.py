"""Export the model of a run for transformers: ``python scripts/export_hf.py RUN OUT``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from llm.cli import command

FORMATS = "auto (default), native: an architecture of transformers, self-contained: with the model's own code"


@command
def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="Export the model of a run to a folder that transformers loads, and check it in a fresh process."
    )
    parser.add_argument("run", metavar="RUN", help="folder of the run")
    parser.add_argument("out", metavar="OUT", help="new folder of the export")
    parser.add_argument("--step", type=int, help="checkpoint of this step (default: the newest)")
    parser.add_argument("--format", default="auto", help=FORMATS)
    options = parser.parse_args(words)

    from transformers.utils import logging

    from llm.export.export import export_run, how_to_load

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    say = lambda line: print(f"{options.run}: {line} ...", flush=True)  # noqa: E731
    print(export_run(options.run, options.out, step=options.step, form=options.format, say=say))
    print(how_to_load(options.out))


if __name__ == "__main__":
    sys.exit(main())
