"""Train a byte-level BPE tokenizer on files of text and save it so that transformers' AutoTokenizer loads it.

The bundled one: python scripts/train_tokenizer.py bundled:train.jsonl --out data/tokenizer --vocab-size 4096
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from llm.cli import command
from llm.data.files import find_files
from llm.data.shards import read_documents
from llm.errors import UserError
from llm.tokenizer import END_OF_DOCUMENT, save_tokenizer, train_bpe

SMALLEST = 257  # the 256 bytes and the end-of-document token


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", help="files, folders or globs of text (jsonl, txt, parquet, arrow; .zst)")
    parser.add_argument("--out", type=Path, required=True, help="folder to write; it must not hold a tokenizer yet")
    parser.add_argument("--vocab-size", type=int, default=32_768, help=f"tokens, {END_OF_DOCUMENT} among them")
    parser.add_argument("--text-column", default="text", help="field of a record that holds the text")
    return parser.parse_args()


@command
def main() -> None:
    """Train and save; nothing is written when something is wrong."""
    arguments = parse_arguments()
    if (arguments.out / "tokenizer.json").exists():
        raise UserError(f"--out {arguments.out} holds a tokenizer already: remove it or choose another folder.")
    if arguments.vocab_size < SMALLEST:
        raise UserError(f"--vocab-size {arguments.vocab_size} is below {SMALLEST} (all bytes and one special token).")
    files = find_files(arguments.paths, key="paths")
    tokenizer = train_bpe(read_documents(files, arguments.text_column), arguments.vocab_size)
    size = tokenizer.get_vocab_size()
    if size < arguments.vocab_size:
        raise UserError(f"The text yields only {size:,} tokens: give more text, or --vocab-size {size}.")
    save_tokenizer(tokenizer, arguments.out)
    print(f"{arguments.out}: {size:,} tokens from {len(files)} file(s)")


if __name__ == "__main__":
    sys.exit(main())
