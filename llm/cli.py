"""What the command lines share: errors as one line, and exit codes."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable

from llm.errors import UserError

USER_ERROR = 2
INTERRUPTED = 130


def command(main: Callable[..., int | None]) -> Callable[..., int]:
    """Wrap a command line's `main`: a `UserError` becomes ``error: ...`` on stderr and exit code 2, no stack trace."""

    @functools.wraps(main)
    def wrapped(*args: object, **kwargs: object) -> int:
        try:
            return main(*args, **kwargs) or 0
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return USER_ERROR
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return INTERRUPTED
        except BrokenPipeError:  # the reader of our output has left: nothing is wrong with us
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0

    return wrapped
