"""Arrows only go down: who may import whom."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = {
    str(p.relative_to(base).with_suffix("")).replace("/", ".").removesuffix(".__init__"): p
    for base, package in ((ROOT, "llm"), (ROOT / "kernels", "mixer_kernels"))
    for p in (base / package).rglob("*.py")
}


def imports(module: str, *, lazy: bool = True) -> set[str]:
    """Modules that `module` imports by absolute name; without `lazy`, at its top level only."""
    tree = ast.parse(MODULES[module].read_text())
    nodes = ast.walk(tree) if lazy else tree.body
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def reached(module: str) -> set[str]:
    """Project modules that `module` needs, itself included, through top-level imports."""
    seen, todo = set(), [module]
    while todo:
        name = todo.pop()
        if name in MODULES and name not in seen:
            seen.add(name)
            todo += imports(name, lazy=False)
    return seen


def within(prefix: str) -> list[str]:
    return [m for m in MODULES if m == prefix or m.startswith(prefix + ".")]


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("mixer_kernels", "llm"),  # a kernel never sees a module
        ("mixer_kernels", "transformers"),
        ("llm.model", "llm.config"),
        ("llm.mixers", "llm.config"),  # a mixer never sees the config tree
        ("llm.mixers", "llm.data"),
        ("llm.model", "llm.data"),
        ("llm.data", "llm.model"),
        ("llm.data", "llm.mixers"),
        ("llm.trainer", "llm.mixers"),  # the trainer never names a mixer
        ("llm.trainer", "llm.build"),
        ("llm.loss", "llm.model"),
        ("llm.optim", "llm.model"),
    ],
)
def test_package_does_not_import(package, forbidden):
    for module in within(package):
        hits = {i for i in imports(module) if i == forbidden or i.startswith(forbidden + ".")}
        assert not hits, f"{module} imports {sorted(hits)}"


def test_only_build_instantiates():
    users = [m for m in MODULES if "hydra.utils" in imports(m)]
    assert users == ["llm.build"]


@pytest.mark.parametrize("module", ["llm.model.decoder", "mixer_kernels"])
def test_model_and_kernels_need_torch_alone(module):
    """So that they run where Hydra, datasets or accelerate are not installed, and in an export."""
    needed = {i.split(".")[0] for m in reached(module) for i in imports(m, lazy=False)}
    assert needed - set(sys.stdlib_module_names) <= {"llm", "mixer_kernels", "torch"}


def test_mixers_and_kernel_names_stay_out_of_generic_files():
    """Adding a mixer touches no generic file: none of them may name one."""
    mixers = {p.stem for p in (ROOT / "configs" / "mixer").glob("*.yaml")} - {"softmax", "hybrid"}
    generic = [m for m in MODULES if m.startswith("llm.") and not m.startswith("llm.mixers.")]
    for module in generic:
        if module in ("llm.usage", "llm.config", "llm.compose", "llm.identity", "llm.layout"):
            continue  # examples in help texts and docstrings
        if module in ("llm.export.native", "llm.export.foreign", "llm.export.fla"):
            continue  # they translate mixers into others' architectures
        tree = ast.parse(MODULES[module].read_text())
        strings = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
        names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
        assert not mixers & (strings | names), f"{module} names {sorted(mixers & (strings | names))}"


def test_kernel_folders_follow_one_order():
    required = {"api", "reference", "chunked", "spec"}
    folders = [p for p in (ROOT / "kernels" / "mixer_kernels").iterdir() if (p / "spec.py").is_file()]
    assert len(folders) >= 2
    for folder in folders:
        assert required <= {p.stem for p in folder.glob("*.py")}, folder.name
        for name in ("reference", "chunked"):
            assert "triton" not in (folder / f"{name}.py").read_text().replace("Triton", "")
