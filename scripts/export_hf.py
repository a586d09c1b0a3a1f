"""Export the model of a run for transformers: ``python scripts/export_hf.py RUN OUT``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from llm.cli import command


@command
def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="Export the model of a run to a folder that transformers loads, and check it in a fresh process."
    )
    parser.add_argument("run", metavar="RUN", help="folder of the run")
    parser.add_argument("out", metavar="OUT", help="new folder of the export")
    parser.add_argument("--step", type=int, help="checkpoint of this step (default: the newest)")
    options = parser.parse_args(words)

    from transformers.utils import logging

    from llm.export.export import export_run

    logging.disable_progress_bar()
    print(f"{options.run}: exporting, and comparing the export with the model in a fresh process ...", flush=True)
    print(export_run(options.run, options.out, step=options.step))
    print(
        f"{options.out}: ready. Load it with\n"
        f"  AutoModelForCausalLM.from_pretrained({options.out!r}, trust_remote_code=True)\n"
        f"  AutoTokenizer.from_pretrained({options.out!r}, trust_remote_code=True)\n"
        "torch and transformers are all that it needs."
    )


if __name__ == "__main__":
    sys.exit(main())
