"""Saving beside training: one checkpoint at a time is written by a thread."""

from __future__ import annotations

import sys
import threading

from llm.checkpoint import Checkpoints, DamagedCheckpoint, Snapshot
from llm.config import CheckpointConfig


class Saver:
    """Writes snapshots into `checkpoints`; a disk that refuses one is reported loudly, and the next is tried again.

    saved_step  newest step that is known to be durable; None before the first
    """

    def __init__(self, checkpoints: Checkpoints, config: CheckpointConfig) -> None:
        self.checkpoints, self.config = checkpoints, config
        self.saved_step: int | None = None
        self._thread: threading.Thread | None = None

    def start(self, snapshot: Snapshot) -> None:
        """Begin to write, after the one before is done. Returns at once when `checkpoint.background` is on."""
        self.wait()
        # no daemon: a process that ends in an orderly way finishes what it writes
        self._thread = threading.Thread(target=self._write, args=(snapshot,), name="save")
        self._thread.start()
        if not self.config.background:
            self.wait()

    @property
    def busy(self) -> bool:
        """Is a checkpoint being written?"""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Return when nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, snapshot: Snapshot) -> None:
        try:
            snapshot.wait()
            self.checkpoints.save(snapshot, self.config)
            self.saved_step = snapshot.step
        except (OSError, DamagedCheckpoint) as error:
            print(f"WARNING: step {snapshot.step} could not be saved: {error}", file=sys.stderr, flush=True)
