"""Export the model of a run for transformers: ``python scripts/export_hf.py RUN OUT``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from llm.cli import command

FORMATS = (
    "auto (default), native: an architecture of transformers, self-contained: with the model's own code, "
    "fla: for flash-linear-attention"
)


@command
def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="Export the model of a run to a folder that transformers loads, and check it in a fresh process."
    )
    parser.add_argument("run", metavar="RUN", help="folder of the run")
    parser.add_argument("out", metavar="OUT", help="new folder of the export")
    parser.add_argument("--step", help="checkpoint of this step, or best: lowest validation loss (default: the newest)")
    parser.add_argument("--format", default="auto", help=FORMATS)
    parser.add_argument("--unchecked", action="store_true", help="do not compare the export with the model")
    parser.add_argument("--license", metavar="ID", help="licence of the model in its card, for instance apache-2.0")
    parser.add_argument("--push-to-hub", metavar="NAME", help="then upload it to this private repository, as user/name")
    parser.add_argument("--public", action="store_true", help="... which everybody can see")
    options = parser.parse_args(words)

    from transformers.utils import logging

    from llm.export.export import export_run, how_to_load, push

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    say = lambda line: print(f"{options.run}: {line} ...", flush=True)  # noqa: E731
    settings = {"step": options.step, "form": options.format, "licence": options.license}
    parity = export_run(options.run, options.out, **settings, check=not options.unchecked, say=say)
    print(parity or "not compared with the model")
    print(how_to_load(options.out))
    if options.push_to_hub:
        print(push(options.out, options.push_to_hub, private=not options.public))


if __name__ == "__main__":
    sys.exit(main())
