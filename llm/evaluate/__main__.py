"""``python -m llm.evaluate RUN...``: losses, recall and decoding of trained runs. See ``--help``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from llm.cli import USER_ERROR, command
from llm.errors import UserError

DESCRIPTION = """Evaluate the model of each RUN on its own held-out data, and write RUN/evaluations/*.json.

validation: loss, perplexity, accuracy and bits per byte of each set, at 1 to 16 times the training length and by the
number of tokens seen. recall: needles in the held-out text (single, multi-key, multi-value) by length and depth.
decoding: tokens/s and bytes of state against the context. What does not fit into memory is tried in smaller parts."""


def parse_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m llm.evaluate", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="folder of a run")
    parser.add_argument("--step", help="checkpoint of this step, or best (default: the newest)")
    parser.add_argument("--only", type=_names, metavar="A,B", help="sections: validation,recall,decoding (all)")
    parser.add_argument("--lengths", type=_numbers, metavar="N,N", help="times the training length (1,2,4,8,16)")
    parser.add_argument("--max-tokens", type=_positive, metavar="N", help="of a set at one length (GPU 2M, CPU 64k)")
    parser.add_argument("--micro-batch", type=_positive, metavar="N", help="rows at a time (as in training)")
    parser.add_argument("--chunk", type=_positive, metavar="N", help="tokens of a row at a time (2048 or the context)")
    parser.add_argument("--recall-lengths", type=_numbers, metavar="N,N", help="times the training length (1,2,4)")
    parser.add_argument("--samples", type=_positive, metavar="N", help="rows of a probe at a depth (GPU 50, CPU 8)")
    parser.add_argument("--contexts", type=_numbers, metavar="N,N", help="decoding (GPU 1k to 128k, CPU 128,512,2048)")
    parser.add_argument("--decoding-batch", type=_positive, metavar="N", help="rows that are decoded at once (1)")
    parser.add_argument("--new-tokens", type=_positive, metavar="N", help="tokens that are decoded (32)")
    parser.add_argument("--precision", choices=("auto", "bf16", "fp32"), help="auto: as training would run here")
    parser.add_argument("--device", help="for instance cpu or cuda:0 (default: a GPU where there is one)")
    parser.add_argument("--json", action="store_true", help="print the results as JSON in place of tables")
    return parser.parse_args(words)


@command
def main(words: Sequence[str] | None = None) -> int:
    """Evaluate every run; one that cannot be read leaves the others alone. Exit code 2 if there was one."""
    arguments = parse_arguments(words)
    from llm.evaluate.evaluation import SECTIONS, Options, evaluate_run  # --help and mistakes answer at once
    from llm.evaluate.results import as_text, write
    from llm.generate import choose_device

    unknown = [name for name in arguments.only or () if name not in SECTIONS]
    if unknown:
        raise UserError(f"--only {unknown[0]}: choose among {', '.join(SECTIONS)}.")
    given = {name: value for name, value in vars(arguments).items() if name in Options.__dataclass_fields__}
    options = Options(**{name: value for name, value in given.items() if value is not None})
    device, results, failed = choose_device(arguments.device), [], False
    for run in arguments.runs:
        try:
            result = evaluate_run(Path(run), arguments.step, device, options)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            failed = True
            continue
        path = write(Path(run), result)
        results.append(result)
        if not arguments.json:
            print(f"{as_text(result)}\n\n{path}\n", flush=True)
    if arguments.json:
        print(json.dumps(results, indent=1))
    return USER_ERROR if failed else 0


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(_positive(part) for part in text.split(","))


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return number


if __name__ == "__main__":
    sys.exit(main())
