"""The training loop. How it is put together::

    accelerator = build_accelerator(config)                     # llm.parallel; first of all, it may set up determinism
    run = open_run(config, main=accelerator.is_main_process)    # llm.runfolder; locks and checks the folder
    model = build_model(config, vocab_size)
    objective = distribute(NextTokenLoss(model), config, accelerator)           # llm.parallel
    optimizer = build_optimizer(config.optim, model, build_leaf)
    rows, validation = training_rows(...), validation_sets(...)                 # llm.data
    loggers = [build_leaf(f"loggers.{name}", leaf) for name, leaf in config.loggers.items()]
    summary = Trainer(config, model, objective, optimizer, rows, validation, loggers, run, accelerator).fit()
    sys.exit(summary.outcome.exit_code)

The trainer continues from the newest checkpoint (or from `init_from`), trains, writes metrics and checkpoints, and
closes the loggers and the run. It knows nothing about mixers: a model is something that `NextTokenLoss` can call and
that has `flops(tokens, sum_len_squared)`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor, nn
from torch.optim import Optimizer

from llm.checkpoint import load_checkpoint
from llm.compiling import compile_objective, compiled_graphs, compiles, uncompiled
from llm.config import TrainConfig
from llm.data import HeldOut, Loader, Rows, batches, merge_states, validation_batches
from llm.data.batch import IGNORED, Batch
from llm.finished import is_good_enough
from llm.guard import Guard, NonFiniteError, save_offending_batches
from llm.loggers import JsonlLogger, Logger, Loggers
from llm.metrics import TIMINGS, TRAINING_FLOPS, Clock, LossWindow, Throughput, peak_memory, perplexity, sum_len_squared
from llm.optim import set_learning_rate
from llm.parallel import Agreement, last_pass, outer_weights
from llm.plan import StepPlan
from llm.probes import forward_statistics, gradient_norms
from llm.profiling import profiler
from llm.runfolder import RunFolder, plain_config
from llm.saving import Saver
from llm.schedules import build_schedule, total_steps
from llm.sharding import whole
from llm.state import TrainState, load_initial_weights, rng_tensors, seed_everything
from llm.stopping import Outcome, StopNow, StopSignals, WallTime

SAVE_ATTEMPTS = 3  # at the end of a run


@dataclass
class Summary:
    """How training ended: the outcome, the step, and the latest values of what was logged."""

    outcome: Outcome
    step: int
    values: dict[str, float]


class Trainer:
    """Trains `model` on `rows` as `config` says; see the top of this file."""

    def __init__(
        self,
        config: TrainConfig,
        model: nn.Module,
        objective: nn.Module,
        optimizer: Optimizer,
        rows: Rows,
        validation: dict[str, HeldOut],
        loggers: Sequence[Logger],
        run: RunFolder,
        accelerator: Accelerator,
        signals: StopSignals | None = None,
    ) -> None:
        self.config, self.rows, self.validation, self.run = config, rows, validation, run
        self.accelerator, self.device = accelerator, accelerator.device
        self.rank, self.world_size = accelerator.process_index, accelerator.num_processes
        self.plan = StepPlan.make(config, self.world_size)
        self.steps = total_steps(config)
        self.schedule = build_schedule(config.schedule, self.steps)
        self.loggers = Loggers(_with_jsonl(loggers) if accelerator.is_main_process else [])

        self.model, self.objective = model, objective
        self.compiled = compiles(config.compile, self.device)
        if self.compiled:
            compile_objective(objective)
        self.state = TrainState(model, optimizer, window=LossWindow(self.device))
        self.batches: Loader | None = None
        self.rolled_back_to: int | None = None
        self.saver = Saver(run.checkpoints, config.checkpoint)
        self.guard = Guard(config.on_nonfinite, config.max_skips, self.device)

        self.clock = Clock(self.device)
        self.throughput = Throughput(self.clock)
        self.wall_time = WallTime(config.max_wall_time)
        self.signals = signals or StopSignals()
        self.agreement = Agreement()

    def fit(self) -> Summary:
        """Train until the last step, `stop_after`, a signal or the end of the time; then save."""
        with self.signals, profiler(self.config.profile and self.rank == 0, self.run.path) as profile:
            try:
                self.resume()
                self._start_loggers()
                self.report()  # of a step whose validation a stop cut short
                while (outcome := self._outcome()) is Outcome.RUNNING:
                    with self._timed():
                        stepped = self.step()
                        self.report()
                    if stepped and self._due(self.config.checkpoint.every):
                        self.save()
                    if profile is not None:
                        profile.step()
                if not self._finish_saving():
                    outcome = Outcome.UNSAVED
            finally:
                self.saver.wait()
                if self.batches is not None:
                    self.batches.close()
                self.loggers.close()
                self.run.close()
        return Summary(outcome, self.state.step, self.state.latest)

    def step(self) -> bool:
        """One optimizer step: all its micro-batches, one update. False, and no step, where a stop was asked for."""
        micro_batches = self._next_batches()
        if micro_batches is None:
            return False
        counted = self._total(sum((batch.targets != IGNORED).sum() for batch in micro_batches))
        loss = torch.zeros((), device=self.device)
        for batch in micro_batches:
            with last_pass(self.objective, batch is micro_batches[-1], self.accelerator):
                loss += self._forward_backward(batch.to(self.device), counted)
        self._probe(micro_batches[0])
        loss, grad_norm = self._total(loss), self.clip()
        if self.guard.admits(self.state.step + 1, loss, grad_norm):
            self._update()
            self._advance(micro_batches)
            self._note(loss, counted, grad_norm)
        else:
            self._pass_over(micro_batches)
        return True

    def _next_batches(self) -> list[Batch] | None:
        """The micro-batches of a step; None where a stop was asked for, even in the middle of waiting for them.

        What was read of them is read again by the resumed run: the position of the data is that of whole steps.
        """
        micro_batches = []
        with suppress(StopNow), self.signals.at_once():
            micro_batches = [next(self.batches) for _ in range(self.plan.passes)]
        return micro_batches if self._asked_to_stop() is Outcome.RUNNING else None

    def _forward_backward(self, batch: Batch, counted: Tensor) -> Tensor:
        """Add this batch's share of the step's gradient; return its summed cross-entropy.

        Dividing by the targets of the whole step, over all passes and ranks, gives one loss curve however they are
        shared out. DDP and FSDP take the mean over ranks, so the sum over ranks is world_size times that.
        """
        sums = self.objective(batch)
        self.accelerator.backward(sums.objective * (self.world_size / counted.clamp(min=1)))
        return sums.cross_entropy

    def _probe(self, batch: Batch) -> None:
        every = self.config.probe_every
        if every and (self.state.step + 1) % every == 0:
            with self.accelerator.autocast(), outer_weights(self.objective):
                statistics = forward_statistics(self.model, batch.to(self.device))
            self.state.probes = gradient_norms(self.model) | statistics

    def clip(self) -> Tensor:
        """Scale the gradient down to `optim.clip` where it is longer; its norm before, over all parameters."""
        limit = float("inf") if self.config.optim.clip is None else self.config.optim.clip
        return whole(nn.utils.clip_grad_norm_(self.model.parameters(), limit))

    def _update(self) -> None:
        set_learning_rate(self.state.optimizer, self.schedule(self.state.step))
        self.state.copies.before_update()
        self.state.optimizer.step()
        self.state.optimizer.zero_grad(set_to_none=True)
        self.state.tokens += self.config.batch_tokens

    def _advance(self, micro_batches: list[Batch]) -> None:
        """The data of a step are used up."""
        self.state.step += 1
        self.state.reported, self.state.val_loss = False, None
        self.data_state = micro_batches[-1].state
        squares = sum(sum_len_squared(batch.row_start) for batch in micro_batches)
        tokens = sum(batch.tokens.numel() for batch in micro_batches)
        flops = TRAINING_FLOPS * self.model.flops(tokens, squares)
        self.throughput.add(tokens=self.config.batch_tokens, flops=flops)
        self.loggers.advance(self.state.step)

    def _note(self, loss: Tensor, counted: Tensor, grad_norm: Tensor) -> None:
        """Add a step to the sums for the next line of metrics. Nothing here waits for the device."""
        spike = self.state.spikes.is_spike(loss / counted.clamp(min=1))
        self.state.window.add(steps=torch.ones(()), loss=loss, counted=counted, grad_norm=grad_norm, loss_spikes=spike)

    def _pass_over(self, micro_batches: list[Batch]) -> None:
        """Leave out a step whose loss or gradient is not finite, as `on_nonfinite` says."""
        bad_step = self.state.step + 1
        self.state.optimizer.zero_grad(set_to_none=True)
        path = save_offending_batches(self.run.path, bad_step, self.rank, micro_batches)
        self._advance(micro_batches)
        if self.config.on_nonfinite == "rollback":
            self._roll_back()
        self.state.window.add(skipped_steps=torch.ones(()))
        self._say(f"WARNING: step {bad_step} was not finite ({self.config.on_nonfinite}); its data are in {path}")

    def _roll_back(self) -> None:
        """Back to the newest checkpoint. The data are not rolled back, or they would do the same again."""
        self.saver.wait()
        if not self._restore_newest():
            raise NonFiniteError(f"step {self.state.step} is not finite, and there is no checkpoint to go back to.")
        self.rolled_back_to = self.state.step
        self.throughput.restart()
        self.loggers.rewind(self.state.step)

    def report(self) -> None:
        """Write this step's line of metrics, with what is due of training values and validation.

        A stop that comes during validation leaves the step unreported, and the resumed run does it again.
        """
        state, values = self.state, {}
        if state.reported:
            return
        first, last = state.step == 1, state.step == self.steps
        if last or self._due(self.config.eval.every):
            self.guard.check()
            values = self.evaluate()
            if values is None:
                return
        if first or last or self._due(self.config.log_every):
            values = self._training_values() | values
        values |= state.probes
        state.probes, state.reported, state.val_loss = {}, True, values.get("val_loss")
        if values:
            state.latest |= {name: x for name, x in values.items() if name not in TIMINGS and "/" not in name}
            self.loggers.log(state.step, values)

    def _training_values(self) -> dict[str, float]:
        """Means since the last line, and how fast it went. Waits for the device."""
        self.guard.check()
        sums = self.state.window.flush()
        values = {}
        if "steps" in sums:
            values = {"loss": sums["loss"] / max(1, sums["counted"]), "grad_norm": sums["grad_norm"] / sums["steps"]}
        return {
            **values,
            **{name: int(sums[name]) for name in ("loss_spikes", "skipped_steps") if sums.get(name)},
            "lr": self.config.optim.lr * self.schedule(self.state.step - 1),
            "tokens": self.state.tokens,
            **self.rows.progress(merge_states(gather_object([self.data_state]))),
            **self.throughput.report(steps_left=self.steps - self.state.step),
            "memory_gib": peak_memory(self.device),
            **({"compiled_graphs": compiled_graphs()} if self.compiled else {}),
        }

    @torch.no_grad()
    def evaluate(self) -> dict[str, float] | None:
        """Loss, perplexity and accuracy of every validation set; None when a stop was asked for meanwhile."""
        values = {}
        with self.clock.paused(), _evaluating(self.objective), uncompiled():
            for name, held_out in self.validation.items():
                means = self._validate(held_out)
                if means is None:
                    return None
                loss, accuracy = means
                prefix = "val" if name == "validation" else f"val_{name}"
                values |= {f"{prefix}_loss": loss, f"{prefix}_perplexity": perplexity(loss)}
                values |= {f"{prefix}_accuracy": accuracy}
        return values

    def _validate(self, held_out: HeldOut) -> tuple[float, float] | None:
        """Mean cross-entropy and share of right predictions over a set's counted targets."""
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)  # cross-entropy, right, counted targets
        micro_batch = max(1, self.plan.micro_batch * self.config.context // held_out.context)
        share = {"rank": self.rank, "world_size": self.world_size, "max_rows": self.config.eval.max_rows}
        for batch in validation_batches(held_out, micro_batch=micro_batch, **share):
            if self._asked_to_stop() is not Outcome.RUNNING:
                return None
            found = self.objective(batch.to(self.device))
            counted = (batch.targets != IGNORED).sum().to(self.device)
            sums += torch.stack([found.cross_entropy.double(), found.right, counted])
        cross_entropy, right, counted = self._total(sums).tolist()
        return cross_entropy / max(1, counted), right / max(1, counted)

    def save(self) -> None:
        """Start to write a checkpoint. A disk that refuses it does not stop training: the next one may succeed."""
        if self.state.step == self.rolled_back_to:
            return  # it is there already
        self.guard.check()
        with self._timed(), self.clock.paused():
            self.loggers.flush()
            ranks = gather_object([(rng_tensors(), self.data_state)])
            if self.state.step:
                self.state.data = merge_states([data for _, data in ranks])
            main = self.accelerator.is_main_process
            snapshot = self.state.capture([rng for rng, _ in ranks], keep=main)
            if main:
                self.saver.start(snapshot)

    def _finish_saving(self) -> bool:
        """Is this step durable? Tries to make it so where it is not yet; all ranks get the same answer."""
        for _ in range(SAVE_ATTEMPTS):
            self.saver.wait()
            missing = self.accelerator.is_main_process and self.saver.saved_step != self.state.step
            if not self.agreement.greatest(missing):
                return True
            self.save()
        return False

    def resume(self) -> None:
        """Go on from the newest good checkpoint, which the main process chooses; else start, maybe from `init_from`."""
        seed_everything(self.config.seed, self.rank)
        if not self._restore_newest() and self.config.init_from:
            load_initial_weights(self.model, self.config.init_from)
        self.data_state = self.state.data
        share = {"rank": self.rank, "world_size": self.world_size, "rows_per_step": self.plan.rows}
        share |= {"workers": self.config.data.workers, "state": self.state.data}
        self.batches = batches(self.rows, micro_batch=self.plan.micro_batch, **share)

    def _restore_newest(self) -> bool:
        """Become the newest good checkpoint, which the main process chooses; False where there is none."""
        snapshot = self.run.checkpoints.load_newest() if self.accelerator.is_main_process else None
        (step,) = broadcast_object_list([snapshot.step if snapshot else None])
        if step is None:
            return False
        snapshot = snapshot or load_checkpoint(self.run.checkpoints.path(step))
        self.state.restore(snapshot, self.rank)
        self.saver.saved_step = step if self.state.reported else None
        self._say(f"continuing from the checkpoint of step {step}")
        if (before := snapshot.state["world_size"]) != self.world_size:
            self._say(
                f"note: up to here the run had {before} process(es), now {self.world_size}: the data are the same, and "
                "the loss but for the order of float additions"
            )
        return True

    def _say(self, text: str) -> None:
        if self.accelerator.is_main_process:
            print(text, file=sys.stderr, flush=True)

    def _start_loggers(self) -> None:
        # the line of an unreported step, if an earlier attempt got that far, is written anew
        step = self.state.step if self.state.reported else self.state.step - 1
        self.loggers.start(run_dir=self.run.path, config=plain_config(self.config), step=step, steps=self.steps)

    def _outcome(self) -> Outcome:
        """Go on, or why not."""
        enough = is_good_enough(self.config.eval.enough_accuracy, self.state.latest)
        if self.state.reported and (self.state.step >= self.steps or enough):
            return Outcome.FINISHED
        asked = self._asked_to_stop()
        if asked is Outcome.RUNNING and self.state.step >= (self.config.stop_after or self.steps):
            return Outcome.STOPPED
        return asked

    def _asked_to_stop(self) -> Outcome:
        """Whether any rank got a signal or is out of time."""
        own = max(self.signals.outcome, Outcome.OUT_OF_TIME if self.wall_time.over() else Outcome.RUNNING)
        return Outcome(self.agreement.greatest(own))

    def _due(self, every: int) -> bool:
        return every > 0 and self.state.step % every == 0

    def _total(self, value: Tensor) -> Tensor:
        """Sum over the ranks."""
        return self.accelerator.reduce(value.to(self.device, non_blocking=True), "sum")

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.wall_time.saw(time.monotonic() - began)


def _with_jsonl(loggers: Sequence[Logger]) -> list[Logger]:
    """metrics.jsonl is always written."""
    return list(loggers) if any(isinstance(x, JsonlLogger) for x in loggers) else [JsonlLogger(), *loggers]


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    module.eval()
    try:
        yield
    finally:
        module.train()
