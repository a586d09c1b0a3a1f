"""Nothing that comes from a file of somebody else is executed."""

from __future__ import annotations

import ast
import json
import pickle
from pathlib import Path

import pytest
import torch

from llm.checkpoint import Checkpoints, Snapshot
from llm.config import CheckpointConfig
from llm.durable import sha256
from llm.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted(path for folder in ("llm", "kernels", "scripts") for path in (ROOT / folder).rglob("*.py"))

FORBIDDEN_MODULES = {"pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
FORBIDDEN_CALLS = {"torch.load", "torch.save", "numpy.load", "np.load", "eval", "exec", "yaml.load", "yaml.unsafe_load"}
SAFE_ARGUMENTS = {"allow_pickle": False, "weights_only": True}


def _calls_and_imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            safe = any(
                isinstance(k.value, ast.Constant) and SAFE_ARGUMENTS.get(k.arg) is k.value.value and k.arg
                for k in node.keywords
            )
            if not safe:
                yield ast.unparse(node.func)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_source_loads_pickles_or_evaluates_text(path):
    found = set(_calls_and_imports(path)) & (FORBIDDEN_CALLS | FORBIDDEN_MODULES)
    assert not found, f"{path} uses {found}"


class Bomb:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return (Path.touch, (self.target,))


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "rng.safetensors", "state.json"])
def test_a_malicious_checkpoint_runs_nothing(tmp_path, name):
    """Every file in turn is a pickle that would make a file, with a manifest that vouches for it."""

    tensors = {"w": torch.ones(2)}
    checkpoints = Checkpoints(tmp_path)
    folder = checkpoints.save(Snapshot(tensors, tensors, tensors, {"step": 1}), CheckpointConfig())
    (folder / name).write_bytes(pickle.dumps(Bomb(tmp_path / "pwned")))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name] = {"bytes": (folder / name).stat().st_size, "sha256": sha256(folder / name)}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="every checkpoint is damaged"):
        checkpoints.load_newest()
    assert not (tmp_path / "pwned").exists()
    pickle.loads(pickle.dumps(Bomb(tmp_path / "pwned")))
    assert (tmp_path / "pwned").exists(), "the bomb would have worked"
