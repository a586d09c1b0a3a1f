"""Write docs/mixers.md from the mixers. With --check, only say whether it is current."""

from __future__ import annotations

import sys
from pathlib import Path

from llm.catalogue import entries, page
from llm.cli import command
from llm.errors import UserError

PAGE = Path(__file__).resolve().parent.parent / "docs" / "mixers.md"


@command
def main() -> None:
    """Write, or check."""
    text = page(entries())
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(text, encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != text:
        raise UserError(f"{PAGE} is not current: run python scripts/describe_mixers.py.")


if __name__ == "__main__":
    sys.exit(main())
