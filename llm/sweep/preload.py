"""Jobs that are forked off a process which has imported everything: a sweep of many short runs does not pay each time.

Python's fork server is that process. It never touches a GPU, or its children could not. Signals that stop a sweep are
blocked in it: what sends them to a whole process group (timeout, a scheduler) would end it, and with it all we know of
its children.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from multiprocessing import forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path

from llm.config import TrainConfig
from llm.stopping import SIGNALS

PRELOADED = ["llm.session", "transformers.models.auto.tokenization_auto"]


class Preloaded:
    """Starts jobs by forking. They are process trees of their own, like those that begin with a fresh interpreter."""

    def __init__(self) -> None:
        # or libraries that count the GPUs while they are imported would set up CUDA in the server
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOADED)
        resource_tracker.ensure_running()  # which the server needs, and which would unblock the signals again
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS.values())
        forkserver.ensure_running()  # it inherits the mask
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS.values())

    def start(self, config: TrainConfig, log: Path, environment: dict[str, str], threads: int | None) -> ForkedProcess:
        """Train the run of `config`; its output is appended to `log`."""
        process = self.context.Process(target=_train, args=(config, str(log), environment, threads))
        process.start()
        return ForkedProcess(process)


class ForkedProcess:
    """A forked job with the methods of `subprocess.Popen` that the queue uses."""

    def __init__(self, process: BaseProcess) -> None:
        self.process = process

    def poll(self) -> int | None:
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.process.pid, number)


def _train(config: TrainConfig, log: str, environment: dict[str, str], threads: int | None) -> None:
    os.setpgrp()  # a terminal's Ctrl-C comes through the sweep alone
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS.values())
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    import torch

    from llm.cli import command
    from llm.session import train

    if threads is not None and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads)
    sys.exit(command(train)(config))
