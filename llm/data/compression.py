"""Reading compressed files from their beginning, noticing those that are damaged or were cut short."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable
from typing import BinaryIO

from llm.errors import UserError

CHUNK = 1 << 17  # compressed bytes read at a time
BUFFER = 1 << 20  # decompressed bytes kept ready


def open_zstd(name: str, opener: Callable[[], BinaryIO]) -> BinaryIO:
    """The contents of a .zst file, which `opener` opens. Raises UserError, naming the file, when it is not whole."""
    return io.BufferedReader(ZstdReader(name, opener()), buffer_size=BUFFER)


def open_gzip(name: str, opener: Callable[[], BinaryIO]) -> BinaryIO:
    """The same for a .gz file."""
    return io.BufferedReader(GzipReader(name, opener()), buffer_size=BUFFER)


class GzipReader(gzip.GzipFile):
    """The decompressed bytes of a .gz file. Owns and closes the file."""

    def __init__(self, name: str, file: BinaryIO) -> None:
        super().__init__(fileobj=file, mode="rb")
        self._label, self._file = name, file

    def readinto(self, buffer: memoryview) -> int:
        try:
            return super().readinto(buffer)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise UserError(f"{self._label}: damaged or cut short ({error}).") from error

    def close(self) -> None:
        super().close()
        self._file.close()


class ZstdReader(io.RawIOBase):
    """The decompressed bytes of a .zst file of one or several frames. Owns and closes the file.

    `zstandard`'s own reader takes a file that ends within a frame for whole.
    """

    def __init__(self, name: str, file: BinaryIO) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise UserError(f"{name}: reading .zst files needs zstandard: pip install 'mixlab[data]'.") from error
        self._name, self._file, self._zstandard = name, file, zstandard
        self._frame = None  # the decompressor of the frame being read; None between frames
        self._input, self._output = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        while not self._output and self._advance():
            pass
        n = min(len(buffer), len(self._output))
        buffer[:n], self._output = self._output[:n], self._output[n:]
        return n

    def close(self) -> None:
        self._file.close()
        super().close()

    def _advance(self) -> bool:
        """Decompress one more chunk; False at the end of the file."""
        self._input = self._input or self._file.read(CHUNK)
        if not self._input:
            if self._frame is not None:
                raise UserError(f"{self._name}: cut short: the file ends within its last part.")
            return False
        self._frame = self._frame or self._zstandard.ZstdDecompressor().decompressobj()
        try:
            self._output = memoryview(self._frame.decompress(self._input))
        except self._zstandard.ZstdError as error:
            raise UserError(f"{self._name}: damaged ({error}).") from error
        self._input = self._frame.unused_data
        if self._frame.eof:
            self._frame = None
        return True
