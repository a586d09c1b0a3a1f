"""Jobs on this machine: a queue over its cards. Each job is a process tree of its own, so that it fails alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol

from llm.cli import INTERRUPTED
from llm.errors import UserError
from llm.stopping import SIGNALS, Outcome
from llm.sweep.jobs import Job
from llm.sweep.preload import Preloaded
from llm.sweep.record import SweepFolder
from llm.sweep.report import job_line, reason_of
from llm.sweep.settings import SweepConfig

POLL_SECONDS = 0.1
STOPPED = (Outcome.PREEMPTED.exit_code, INTERRUPTED)  # the same command goes on from there


class Process(Protocol):
    """What the queue asks of a running job."""

    def poll(self) -> int | None: ...

    def send_signal(self, number: int) -> None: ...


@dataclass
class Running:
    """A job on its cards."""

    index: int
    process: Process
    cards: list[str]
    began: float
    log: Path
    shown: int  # bytes of the log that were shown already


class LocalQueue:
    """Runs the waiting jobs of a sweep, as many at a time as there is room for."""

    def __init__(self, settings: SweepConfig, folder: SweepFolder) -> None:
        self.settings, self.folder = settings, folder
        self.free = places(settings)
        self.in_turn = len(self.free) == 1
        self.threads = None if self.in_turn else max(1, (os.cpu_count() or 1) // len(self.free))
        self.preloaded = Preloaded() if settings.preload else None
        self.running: list[Running] = []
        self.received: int | None = None

    def run(self) -> int | None:
        """Run to the end, or until a signal has come and the jobs that ran have saved. Returns that signal."""
        waiting = self.folder.waiting()
        previous = {number: signal.signal(number, self._receive) for number in SIGNALS.values()}
        try:
            while self.running or (waiting and self.received is None):
                while waiting and self.free and self.received is None:
                    self._start(waiting.pop(0), self.free.pop(0))
                time.sleep(POLL_SECONDS)
                for job in list(self.running):
                    self._look_at(job)
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
        return self.received

    def _receive(self, number: int, frame: FrameType | None) -> None:
        """Hand a signal on to the jobs that run, so that they can save; no other begins."""
        self.received = number
        for job in self.running:
            if job.process.poll() is None:
                self._tell(job.process)

    def _tell(self, process: Process) -> None:
        """torchrun knows SIGTERM and SIGINT alone."""
        known = self.settings.gpus_per_job == 1 or self.received == signal.SIGINT
        process.send_signal(self.received if known else signal.SIGTERM)

    def _start(self, index: int, cards: list[str]) -> None:
        job, log = self.folder.jobs[index], self.folder.log(index)
        shown = log.stat().st_size if log.exists() else 0
        process = self._launch(job, cards, log)
        self.running.append(Running(index, process, cards, time.monotonic(), log, shown))
        if self.received is not None:  # it came between the last look and now
            self._tell(process)
        starts = self.folder.record["jobs"][index]["starts"] + 1
        self.folder.note(index, status="running", exit_code=None, reason=None, starts=starts)
        where = f" on GPU {','.join(cards)}" if cards else ""
        print(f"[{index + 1}/{len(self.folder.jobs)}] {' '.join(job.words)} -> {job.run_dir}{where}", flush=True)

    def _launch(self, job: Job, cards: list[str], log: Path) -> Process:
        environment = {"MIXLAB_SWEEP": self.folder.record["name"]}
        if cards:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(cards)
        if self.preloaded is not None:
            return self.preloaded.start(job.config, log, environment, self.threads)
        if self.threads is not None:
            environment["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", str(self.threads))
        command = training_command(job.words, self.settings.gpus_per_job)
        with log.open("ab") as output:
            # a process group of its own: a terminal's Ctrl-C comes through us alone
            return subprocess.Popen(
                command, stdout=output, stderr=output, env={**os.environ, **environment}, process_group=0
            )

    def _look_at(self, job: Running) -> None:
        code = job.process.poll()
        if self.in_turn:
            self._show(job)
        if code is None:
            return
        self.running.remove(job)
        self.free.append(job.cards)
        status = self._status(code)
        before = self.folder.record["jobs"][job.index]["seconds"]
        self.folder.note(
            job.index,
            status=status,
            exit_code=code,
            seconds=round(before + time.monotonic() - job.began, 1),
            reason=reason_of(job.log, code) if status == "failed" else None,
        )
        print(job_line(self.folder, job.index), flush=True)

    def _status(self, code: int) -> str:
        """torchrun ends with 1 when a signal ends it, however well its processes saved."""
        told = self.received is not None and self.settings.gpus_per_job > 1
        return "done" if code == 0 else "stopped" if code in STOPPED or told else "failed"

    def _show(self, job: Running) -> None:
        """What a job printed since, where jobs run in turn."""
        with job.log.open("rb") as file:
            file.seek(job.shown)
            new = file.read()
        job.shown += len(new)
        sys.stdout.write(new.decode(errors="replace"))
        sys.stdout.flush()


def training_command(words: list[str], gpus: int) -> list[str]:
    """The command line of a job, in processes of which each has one of `gpus` cards."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(gpus)] if gpus > 1 else []
    return [sys.executable, *launcher, "-m", "llm.train", *words]


def places(settings: SweepConfig) -> list[list[str]]:
    """The cards of each job that can run at the same time; [] for one that takes what there is.

    Raises UserError where the machine has fewer cards than are asked for.
    """
    each, cards = settings.gpus_per_job, visible_cards()
    wanted = settings.n_gpus or each
    if wanted > max(1, len(cards)) and (cards or settings.n_gpus):
        raise UserError(
            f"n_gpus={wanted}: this machine shows {len(cards)}. Ask for fewer, or see CUDA_VISIBLE_DEVICES."
        )
    groups = [cards[i : i + each] for i in range(0, wanted, each)] if cards else [[]]
    return [list(group) for _ in range(settings.jobs_per_gpu) for group in groups]


def visible_cards() -> list[str]:
    """The names of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES takes them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name.strip() for name in visible.split(",") if name.strip()]
    import torch  # only here: seconds, which a sweep that is told need not wait

    return [str(i) for i in range(torch.cuda.device_count())]
