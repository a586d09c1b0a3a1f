"""Begin a run from a model of transformers: ``python scripts/import_hf.py NAME_OR_DIR RUN``."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence

from llm.cli import command


@command
def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="Make a run folder whose step 0 has the weights of an export of ours, or of a Llama or Qwen3 model."
    )
    parser.add_argument("source", metavar="NAME_OR_DIR", help="folder or hub name; code that comes with it is not run")
    parser.add_argument("run", metavar="RUN", help="new run folder")
    parser.add_argument("--linear", metavar="MIXER", help="make a softmax model a hybrid with layers of this mixer")
    parser.add_argument(
        "--per-softmax", type=int, default=3, metavar="N", help="... N to a softmax layer (%(default)s)"
    )
    options = parser.parse_args(words)

    from transformers.utils import logging

    from llm.export.imports import import_model

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    described = import_model(options.source, options.run, linear=options.linear, per_softmax=options.per_softmax)
    train = ["python", "-m", "llm.train", f"init_from={options.run}", *described]
    print(
        f"{options.run}: ready. Train it further, with data, steps and optimizer of your choice:\n  {shlex.join(train)}"
    )


if __name__ == "__main__":
    sys.exit(main())
