"""Reading .zst files, noticing those that were cut short (which `zstandard`'s own reader takes for whole)."""

from __future__ import annotations

import io
from typing import BinaryIO

from llm.errors import UserError

CHUNK = 1 << 17  # compressed bytes read at a time


class ZstdReader(io.RawIOBase):
    """The decompressed bytes of a file of one or several frames, from its beginning. Owns and closes the file.

    Raises UserError, naming the file, when it is damaged or ends within a frame.
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
