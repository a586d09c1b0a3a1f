"""The one kind of error that a user's mistake raises."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MANY = 30  # more names than one reads in a message


class UserError(Exception):
    """A mistake that the user can mend: the message names the key, the value and the remedy.

    Command lines print it without a stack trace and exit with code 2.
    """


def suggest(wrong: str, known: Iterable[str]) -> str:
    """' Did you mean X?' when something known is close to `wrong`, else a list of what is known."""
    known = sorted(known)
    close = difflib.get_close_matches(wrong, known, n=1)
    if close:
        return f" Did you mean {close[0]}?"
    if len(known) > MANY:
        return " See --help for what there is."
    return f" Known: {', '.join(known)}." if known else ""
