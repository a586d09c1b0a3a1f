"""Files read over HTTP by ranges, through interruptions of the network."""

from __future__ import annotations

import io
import logging
import random
import re
import time
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from llm.errors import UserError

log = logging.getLogger(__name__)

ATTEMPTS = 10  # of one range: about two minutes with the waits below
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0  # seconds before the second attempt, doubled each time up to the longest
TIMEOUT = 30.0  # seconds without a byte
BLOCK = 8 << 20  # bytes fetched at a time when less is asked for
RETRIED = {408, 425, 429, 500, 502, 503, 504}
REFUSED = {401: "access needs a login (hf auth login)", 403: "access is refused (gated?)", 404: "there is no such file"}


def is_url(name: str) -> bool:
    """Is it read over the network?"""
    return name.startswith(("http://", "https://"))


class RemoteFile(io.RawIOBase):
    """A file at a URL, seekable. Raises UserError, naming the URL, when it cannot be read."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._position = 0
        self._block_start, self._block = 0, b""
        self._size: int | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size() if whence == io.SEEK_END else 0}
        self._position = base[whence] + offset
        return self._position

    def size(self) -> int:
        """Bytes of the file."""
        if self._size is None:
            self._block, self._size = fetch(self.url, 0, BLOCK)
            self._block_start = 0
        return self._size

    def readinto(self, buffer: memoryview) -> int:
        n = min(len(buffer), self.size() - self._position)
        if n <= 0:
            return 0
        start = self._position - self._block_start
        if not 0 <= start < len(self._block):
            end = min(self.size(), self._position + max(n, BLOCK))
            self._block, _ = fetch(self.url, self._position, end)
            self._block_start, start = self._position, 0
        part = self._block[start : start + n]
        buffer[: len(part)] = part
        self._position += len(part)
        return len(part)


def open_url(url: str) -> io.BufferedReader:
    """The file at `url`, opened for reading."""
    return io.BufferedReader(RemoteFile(url), buffer_size=1 << 16)


def fetch(url: str, start: int, end: int) -> tuple[bytes, int]:
    """Bytes start .. end (or to the file's end) and the file's size; tries again after what may pass.

    Raises UserError, naming the URL, for what will not pass, and when all attempts have failed.
    """
    wait, reason = FIRST_WAIT, ""
    for attempt in range(ATTEMPTS):
        if attempt:
            log.warning("%s: %s; attempt %d of %d in %.1f s", url, reason, attempt + 1, ATTEMPTS, wait)
            time.sleep(wait * random.uniform(0.5, 1.0))
            wait = min(2 * wait, LONGEST_WAIT)
        try:
            return _fetch_once(url, start, end)
        except _Passing as error:
            reason, wait = str(error), max(wait, error.wait)
    raise UserError(f"{url}: unreadable after {ATTEMPTS} attempts, the last one: {reason}.")


class _Passing(Exception):
    """A failure that may pass, with the seconds that the server asked to wait."""

    def __init__(self, reason: str, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.wait = wait


def _fetch_once(url: str, start: int, end: int) -> tuple[bytes, int]:
    request = Request(url, headers={"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"})
    for name, value in _login(url).items():
        request.add_unredirected_header(name, value)  # the hub redirects to other servers, which must not see it
    try:
        with urlopen(request, timeout=TIMEOUT) as response:
            return _checked(url, response.status, response.headers, response.read(), start, end)
    except HTTPError as error:
        if error.code in RETRIED:
            raise _Passing(f"HTTP {error.code}", _seconds(error.headers.get("Retry-After", ""))) from error
        why = REFUSED.get(error.code, "the server refuses")
        raise UserError(f"{url}: {why} (HTTP {error.code}).") from error
    except (OSError, HTTPException) as error:
        raise _Passing(f"{type(error).__name__}: {error}") from error


def _checked(url: str, status: int, headers: Any, content: bytes, start: int, end: int) -> tuple[bytes, int]:
    """The answer's bytes and the file's size, if it is the range asked for and whole."""
    if status != 206:
        raise UserError(f"{url}: the server does not serve ranges of files (HTTP {status}): download the file.")
    size = int(re.fullmatch(r"bytes \d+-\d+/(\d+)", headers["Content-Range"])[1])
    if len(content) != min(end, size) - start:
        raise _Passing(f"{len(content):,} bytes of {min(end, size) - start:,}")
    return content, size


def _seconds(retry_after: str) -> float:
    return min(float(retry_after), 300.0) if retry_after.isdigit() else 0.0


def _login(url: str) -> dict[str, str]:
    """The header that proves who asks, for URLs of the hub alone."""
    from huggingface_hub.constants import ENDPOINT
    from huggingface_hub.utils import build_hf_headers

    headers = build_hf_headers() if url.startswith(f"{ENDPOINT}/") else {}
    return {name: value for name, value in headers.items() if name.lower() == "authorization"}
