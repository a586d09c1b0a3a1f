"""Show what training would see: a few decoded rows with their boundaries, shares, and document lengths.

python scripts/show_data.py data=local data.path=my.jsonl context=1024 --rows 2 --plot lengths.png
The words without dashes are those of python -m llm.train.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from llm.build import build_leaf
from llm.cli import command
from llm.compose import compose
from llm.data import training_rows, validation_sets
from llm.data.inspect import describe_row, histogram, take_sample
from llm.tokenizer import load_tokenizer


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="data=..., tokenizer=..., context=... as for training")
    parser.add_argument("--rows", type=int, default=3, help="rows to print")
    parser.add_argument("--sample", type=int, default=256, help="rows to count shares over")
    parser.add_argument("--documents", type=int, default=10_000, help="documents to measure the lengths of")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the histogram of lengths into a .png or .pdf")
    return parser.parse_args()


@command
def main() -> None:
    """Print."""
    arguments = parse_arguments()
    config = compose(arguments.words)
    tokenizer = load_tokenizer(config.tokenizer.path)
    source = build_leaf("data.source", config.data.source)
    rows = training_rows(config.data, source, tokenizer, config.context)
    print("training:", ", ".join(f"{key} {value}" for key, value in rows.summary().items()))
    for name, held_out in validation_sets(config.data, source, tokenizer, config.context).items():
        print(f"{name}: {len(held_out):,} rows of {held_out.context:,}, {held_out.tokens:,} predicted tokens")
    sample = take_sample(rows, max(arguments.sample, arguments.rows), eos_id=tokenizer.eos_token_id)
    for number, row in enumerate(sample.rows[: arguments.rows]):
        print(f"\nrow {number} of {rows.context:,} tokens (from +length | text):")
        print("\n".join(describe_row(row, tokenizer)))
    print(f"\nin the first {len(sample.rows):,} rows of {rows.context:,} tokens:")
    print(f"  {sample.counted / sample.inputs:.2%} of the targets are predicted")
    print(f"  {sample.padding / sample.inputs:.2%} of the tokens are padding")
    print(
        f"  {sample.pieces:,} documents or parts of one, {sample.cut / sample.pieces:.1%} cut by the end of their row"
    )
    for name, count in sample.sources.items():
        print(f"  {count / len(sample.rows):.1%} of the rows from {name or rows.name}")
    show_lengths(rows.document_lengths(arguments.documents), arguments.plot)


def show_lengths(lengths: np.ndarray, plot: Path | None) -> None:
    """Print and draw the histogram of document lengths."""
    if not len(lengths):
        return
    print(
        f"\ntokens a document, {len(lengths):,} documents: mean {lengths.mean():,.0f}, median {np.median(lengths):,.0f}"
    )
    print("\n".join(histogram(lengths)))
    if plot:
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots()
        axes.hist(lengths, bins=np.geomspace(max(1, lengths.min()), lengths.max() + 1, 50))
        axes.set(xscale="log", xlabel="tokens a document", ylabel="documents")
        figure.savefig(plot)
        print(f"drawn: {plot}")


if __name__ == "__main__":
    sys.exit(main())
