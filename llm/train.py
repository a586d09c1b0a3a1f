"""``python -m llm.train``: compose, build, fit. See ``--help`` and `llm.usage`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from llm.cli import command
from llm.compose import compose
from llm.sweep import sweep
from llm.usage import usage

HELP, SWEEP = {"-h", "--help"}, {"-m", "--multirun"}


@command
def main(words: Sequence[str] | None = None) -> int:
    """Train as the words of the command line say. Returns the exit code."""
    words = list(sys.argv[1:] if words is None else words)
    if HELP & set(words):
        print(usage())
        return 0
    if SWEEP & set(words):
        return sweep([word for word in words if word not in SWEEP])
    config = compose(words)
    from llm.session import dry_run, train  # torch, transformers and accelerate: seconds that --help need not wait

    return dry_run(config) if config.dry_run else train(config)


if __name__ == "__main__":
    sys.exit(main())
