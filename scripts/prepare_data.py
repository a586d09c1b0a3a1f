"""Tokenise files of text once into a folder of memory-mapped shards, for training with data.path=OUT.

python scripts/prepare_data.py my/*.parquet --tokenizer bundled:tokenizer --out prepared/mine
An interrupted preparation goes on when the same command is given again. --verify OUT reads and checks a folder.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from tqdm import tqdm

from llm.cli import command
from llm.data.encode import Encoder
from llm.data.hub import HubDataset
from llm.data.prepare import SPLITS, Job, prepare
from llm.data.prepared import read_manifest, verify
from llm.data.text import TextFiles, TextSource
from llm.errors import UserError
from llm.tokenizer import load_tokenizer


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", help="files, folders, globs or URLs of text")
    parser.add_argument("--hub", metavar="NAME", help="a dataset of the Hugging Face hub instead of paths")
    parser.add_argument("--subset", help="configuration of the hub dataset")
    parser.add_argument("--split", default="train", help="split of the hub dataset")
    parser.add_argument("--revision", help="branch, tag or commit of the hub dataset")
    parser.add_argument("--out", type=Path, help="folder to write")
    parser.add_argument("--tokenizer", default="bundled:tokenizer", help="folder or hub name")
    parser.add_argument("--text-column", default="text", help="field of a record that holds the text")
    parser.add_argument("--held-out", type=float, default=0.0, help="share of documents put into a validation split")
    parser.add_argument("--bos", action="store_true", help="put the beginning-of-document token before each document")
    parser.add_argument("--licence", default="not stated", help="licence of the text, kept in the manifest")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes; 0: this one alone")
    parser.add_argument("--verify", type=Path, metavar="OUT", help="read a prepared folder whole and check it")
    return parser.parse_args()


def find_source(arguments: argparse.Namespace) -> tuple[TextSource, str]:
    """The source and what to call it."""
    if bool(arguments.paths) == bool(arguments.hub):
        raise UserError("Give either paths or --hub NAME.")
    if arguments.hub:
        settings = {"split": arguments.split, "revision": arguments.revision, "text_column": arguments.text_column}
        return HubDataset(arguments.hub, arguments.subset, **settings), f"hub:{arguments.hub}"
    return TextFiles(arguments.paths, text_column=arguments.text_column), " ".join(arguments.paths)


@command
def main() -> None:
    """Prepare or verify."""
    arguments = parse_arguments()
    if arguments.verify:
        print(f"{arguments.verify}: {verify(arguments.verify)} pieces are as they were written")
        return
    if not arguments.out:
        raise UserError("--out is not given: the folder to write.")
    source, name = find_source(arguments)
    encoder = Encoder(load_tokenizer(arguments.tokenizer), bos=arguments.bos)
    about = {"path": name, "identity": source.identity(), "licence": arguments.licence}
    job = Job(source.training_shards(), encoder, arguments.held_out, about)
    start, tokens, text = (
        time.monotonic(),
        0,
        "{l_bar}{bar}| {n_fmt}/{total_fmt} pieces, {elapsed}, {remaining} left{postfix}",
    )
    with tqdm(total=len(job.units()), bar_format=text) as bar:
        for _, _, records in prepare(job, arguments.out, workers=arguments.workers):
            tokens += sum(record.tokens for record in records.values())
            bar.set_postfix_str(f"{tokens / 1e6:.1f}M tokens, {tokens / (time.monotonic() - start) / 1e6:.2f}M/s")
            bar.update()
    summarise(arguments.out, time.monotonic() - start)


def summarise(out: Path, seconds: float) -> None:
    """Print what was written."""
    manifest = read_manifest(out)
    for split in SPLITS:
        records = manifest["splits"][split]
        documents, tokens = (sum(record[key] for record in records) for key in ("documents", "tokens"))
        print(f"{out}/{split}: {documents:,} documents, {tokens:,} tokens ({manifest['dtype']}), {len(records)} pieces")
    print(f"done in {seconds:.0f} s; train with: data=local data.path={out}")


if __name__ == "__main__":
    sys.exit(main())
