"""Checkpoints on the disk: safetensors and JSON, written atomically, hashed, and verified before they are trusted.

    checkpoints/step_00000123/
        model.safetensors        fp32, whole tensors; model-00001-of-00003.safetensors, ... above a size
        optimizer.safetensors    '<entry>/<parameter name>'
        rng.safetensors          of every rank
        state.json               step, tokens, position of the data, ...
        manifest.json            size and SHA-256 of each of these, written last

A folder under its final name is complete: it is written as `.tmp-...`, synced, then renamed. Nothing here runs code
from a file: no pickle, and names in a manifest cannot leave the folder.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from llm.config import CheckpointConfig
from llm.durable import TEMPORARY, sha256, sync, write_file
from llm.errors import UserError

FORMAT = 1
PART_BYTES = 4 * 2**30
REPLACED = f"{TEMPORARY}replaced-"
TENSOR_GROUPS = ("model", "optimizer", "rng")


class DamagedCheckpoint(Exception):
    """A checkpoint that is incomplete or altered; the message says which file and how."""


@dataclass
class Snapshot:
    """What a checkpoint holds: tensors on the CPU by group and name, and JSON data.

    The tensors may still be on their way from a GPU: they are there after `wait`.
    """

    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    rng: dict[str, Tensor]
    state: dict[str, Any]
    wait: Callable[[], None] = lambda: None

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.state["step"]


class Checkpoints:
    """The checkpoints of one run, in `run_dir`/checkpoints."""

    def __init__(self, run_dir: Path, *, part_bytes: int = PART_BYTES) -> None:
        self.folder = run_dir / "checkpoints"
        self.part_bytes = part_bytes

    def path(self, step: int) -> Path:
        """Where the checkpoint of `step` is."""
        return self.folder / f"step_{step:08d}"

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, damaged or not, oldest first."""
        names = (re.fullmatch(r"step_(\d{8,})", p.name) for p in self.folder.glob("step_*"))
        return sorted(int(match[1]) for match in names if match)

    def others(self, damaged: Path) -> str:
        """What to say of the checkpoints beside a damaged one."""
        steps = [str(step) for step in self.steps() if self.path(step) != damaged]
        return f"the other steps are {', '.join(steps)}" if steps else "there is no other checkpoint"

    def save(self, snapshot: Snapshot, config: CheckpointConfig) -> Path:
        """Write a checkpoint durably, verify it, and only then drop those that `config` does not keep.

        Raises OSError (disk full, folder gone) or DamagedCheckpoint; earlier checkpoints are untouched then.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        final = self.path(snapshot.step)
        aside = self.folder / f"{TEMPORARY}{final.name}"
        shutil.rmtree(aside, ignore_errors=True)
        try:
            write_checkpoint(aside, snapshot, self.part_bytes)
            _replace_folder(aside, final)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        verify(final)
        self.prune(config, newest=snapshot.step)
        return final

    def prune(self, config: CheckpointConfig, *, newest: int) -> None:
        """Drop checkpoints up to step `newest`, which has to be known good, but for those that `config` keeps."""
        steps = [step for step in self.steps() if step <= newest]
        kept = set(steps[-max(1, config.keep) :])
        if config.keep_every:
            kept |= {step for step in steps if step % config.keep_every == 0}
        if config.keep_best:
            kept |= self.best(steps)
        for step in steps:
            if step not in kept:
                _discard(self.path(step))

    def best(self, steps: list[int]) -> set[int]:
        """The one of `steps` with the lowest validation loss, if any was measured there."""
        losses = {}
        for step in steps:
            try:
                losses[step] = read_manifest(self.path(step))["val_loss"]
            except DamagedCheckpoint:
                continue
        measured = [step for step, loss in losses.items() if loss is not None]
        return {min(measured, key=losses.__getitem__)} if measured else set()

    def recover(self) -> None:
        """Undo what a crash left half done. Only for the holder of the run's lock, before anything is saved."""
        for old in self.folder.glob(f"{REPLACED}*"):
            final = self.folder / old.name.removeprefix(REPLACED)
            if not final.exists():
                os.rename(old, final)
        for path in self.folder.glob(f"{TEMPORARY}*"):
            shutil.rmtree(path, ignore_errors=True)

    def load_newest(self) -> Snapshot | None:
        """The newest checkpoint that is whole, or None where there is none at all.

        Damaged ones are reported on stderr and passed over; UserError when nothing else is left.
        """
        damaged = []
        for step in reversed(self.steps()):
            try:
                return load_checkpoint(self.path(step))
            except DamagedCheckpoint as error:
                print(f"warning: passing over a damaged checkpoint: {error}", file=sys.stderr, flush=True)
                damaged.append(str(error))
        if damaged:
            raise UserError(
                f"{self.folder}: every checkpoint is damaged ({'; '.join(damaged)}). "
                "Remove the run's folder to start again, or restore a checkpoint."
            )
        return None


def write_checkpoint(folder: Path, snapshot: Snapshot, part_bytes: int = PART_BYTES) -> None:
    """Write and sync all files of a checkpoint into a new folder, the manifest last."""
    folder.mkdir()
    for group in TENSOR_GROUPS:
        for name, tensors in _parts(group, getattr(snapshot, group), part_bytes):
            _save_tensors(tensors, folder / name)
    write_file(folder / "state.json", json.dumps(snapshot.state, indent=1).encode())
    files = {p.name: {"bytes": p.stat().st_size, "sha256": sha256(p)} for p in sorted(folder.iterdir())}
    manifest = {"format": FORMAT, "step": snapshot.step, "val_loss": snapshot.state.get("val_loss"), "files": files}
    write_file(folder / "manifest.json", json.dumps(manifest, indent=1).encode())
    sync(folder)


def _save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    try:
        safetensors.torch.save_file(tensors, path)
    except SafetensorError as error:  # what its writer makes of a full disk
        raise OSError(f"{path}: {error}") from error
    sync(path)


def _parts(group: str, tensors: dict[str, Tensor], part_bytes: int) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """(file name, tensors) of a group: whole tensors, at most `part_bytes` a file unless one alone is larger."""
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if parts[-1] and size + tensor.nbytes > part_bytes:
            parts.append({})
            size = 0
        parts[-1][name] = tensor.contiguous()
        size += tensor.nbytes
    for i, part in enumerate(parts, 1):
        yield (f"{group}.safetensors" if len(parts) == 1 else f"{group}-{i:05d}-of-{len(parts):05d}.safetensors"), part


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint. DamagedCheckpoint unless it is well formed and names plain files only."""
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
        version, _ = manifest["format"], manifest["val_loss"]
        names = [name for name, stated in manifest["files"].items() if (stated["bytes"], stated["sha256"])]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(f"{folder}: manifest.json is missing or unreadable") from error
    if version != FORMAT:
        raise UserError(f"{folder} has format {version}, but this version of mixlab reads {FORMAT}.")
    for name in names:
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise DamagedCheckpoint(f"{folder}: manifest.json names {name!r}, which is not a file of this folder")
    missing = {"state.json", *TENSOR_GROUPS} - {_group_of(name) for name in names}
    if missing:
        raise DamagedCheckpoint(f"{folder}: manifest.json lacks {', '.join(sorted(missing))}")
    return manifest


def verify(folder: Path, *, group: str | None = None) -> dict[str, Any]:
    """The manifest of a checkpoint whose files all have the size and hash that it states, else DamagedCheckpoint.

    With `group`, one of TENSOR_GROUPS, only the files of that one are looked at.
    """
    manifest = read_manifest(folder)
    for name, stated in manifest["files"].items():
        if group is not None and _group_of(name) != group:
            continue
        path = folder / name
        if not path.is_file() or path.is_symlink():
            raise DamagedCheckpoint(f"{path} is missing")
        if path.stat().st_size != stated["bytes"]:
            raise DamagedCheckpoint(f"{path} has {path.stat().st_size} bytes instead of {stated['bytes']}")
        if sha256(path) != stated["sha256"]:
            raise DamagedCheckpoint(f"{path} differs from the hash in manifest.json")
    return manifest


def load_checkpoint(folder: Path) -> Snapshot:
    """Verify and read a whole checkpoint. Raises DamagedCheckpoint."""
    files = verify(folder)["files"]
    groups = {group: _load_group(folder, files, group) for group in TENSOR_GROUPS}
    try:
        state = json.loads((folder / "state.json").read_bytes())
    except ValueError as error:
        raise DamagedCheckpoint(f"{folder / 'state.json'}: {error}") from error
    return Snapshot(state=state, **groups)


def load_weights(folder: Path) -> dict[str, Tensor]:
    """Verify and read the model of a checkpoint alone: name -> fp32 tensor on the CPU. Raises DamagedCheckpoint."""
    return _load_group(folder, verify(folder, group="model")["files"], "model")


def _group_of(name: str) -> str:
    """model-00001-of-00002.safetensors -> model"""
    return re.sub(r"(-\d+-of-\d+)?\.safetensors$", "", name)


def _load_group(folder: Path, files: dict[str, Any], group: str) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name in files:
        if _group_of(name) == group:
            try:
                tensors |= safetensors.torch.load_file(folder / name)
            except SafetensorError as error:
                raise DamagedCheckpoint(f"{folder / name}: {error}") from error
    return tensors


def _replace_folder(aside: Path, final: Path) -> None:
    """Rename `aside` to `final`. One that is there already steps back first, so that `recover` could bring it back."""
    old = final.with_name(REPLACED + final.name)
    if final.exists():
        os.rename(final, old)
    os.rename(aside, final)
    sync(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def _discard(folder: Path) -> None:
    """Remove a checkpoint so that no half of it ever bears its name."""
    doomed = folder.with_name(f"{TEMPORARY}discard-{folder.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(folder, doomed)
    shutil.rmtree(doomed, ignore_errors=True)
