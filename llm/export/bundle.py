"""The project's modules as flat files that import one another relatively, as transformers' remote code wants them.

From a module and the classes of the mixers, imports are followed to every module of the project (and of a mixer's own
package) that is needed; ``llm/mixers/gdn.py`` becomes ``llm_mixers_gdn.py`` and ``from llm.mixers.decay import x``
becomes ``from .llm_mixers_decay import x``. Everything else stays as it was written.

Imports inside functions are followed as well: the Triton kernels, which are imported where they are to run, go along.
What modules read from files here (`REPLACED`) is written into modules there, since only modules are copied.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import pprint
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from llm.errors import UserError
from mixer_kernels.common.stored import stored_configurations

OWN = ("llm", "mixer_kernels")
PRESENT = {"torch", "transformers", *sys.stdlib_module_names}  # wherever an export is loaded
TARGETS = "llm.export.targets"
STORED = "mixer_kernels.common.stored"
REPLACED = (TARGETS, STORED)


def bundle(entry: str, targets: Iterable[str]) -> dict[str, str]:
    """File name -> text of module `entry` and all that it and the classes `targets` need.

    `entry` keeps the last part of its name. Raises UserError for an import that has no relative form.
    """
    targets = sorted(set(targets))
    bundled = [target for target in targets if target.split(".")[0] not in PRESENT]
    roots = {*OWN, *(target.split(".")[0] for target in bundled)}
    modules, todo = {}, [entry, *(target.rpartition(".")[0] for target in bundled)]
    while todo:
        name = todo.pop()
        if name not in modules and name not in REPLACED:
            modules[name] = rewrite(name, frozenset(roots))
            todo += modules[name].needed
    files = {file_name(m): done.text for m, done in modules.items() if m != entry}
    files[f"{entry.rpartition('.')[2]}.py"] = modules[entry].text
    files[file_name(TARGETS)] = table(targets, sorted({*modules, *REPLACED} - {entry, TARGETS}))
    files[file_name(STORED)] = stored(modules)
    return dict(sorted(files.items()))


class Rewritten:
    """A module's new text, and the project's modules that it needs."""

    def __init__(self, text: str, needed: list[str]) -> None:
        self.text, self.needed = text, needed


def file_name(module: str) -> str:
    """``llm.mixers.gdn`` -> ``llm_mixers_gdn.py``."""
    return f"{flat(module)}.py"


def flat(module: str) -> str:
    return module.replace(".", "_")


def table(targets: list[str], modules: list[str]) -> str:
    """What an export has in place of `llm.export.targets`.

    transformers copies the files that it finds named in ``from .x import``, so that all of them are, where nothing
    imports them before they are needed: Triton may be missing.
    """
    modules_of = {target: target.rpartition(".")[0] for target in targets}
    rows = [
        f'    "{target}": {flat(module) if module in modules else module}.{target.rpartition(".")[2]},'
        for target, module in modules_of.items()
    ]
    named = [f"    from .{flat(module)} import __name__ as _" for module in modules]
    imported = [
        f"from . import {flat(module)}" if module in modules else f"import {module}"
        for module in sorted(set(modules_of.values()))
    ]
    return "\n".join(
        [
            '"""The classes of this model\'s mixers."""',
            "",
            *imported,
            "",
            "CLASSES = {",
            *rows,
            "}",
            "",
            "",
            "def find_class(target: str) -> type:",
            "    return CLASSES[target]",
            "",
            "",
            "def _files_of_this_model() -> None:",
            *named,
            "",
        ]
    )


def stored(modules: Iterable[str]) -> str:
    """What an export has in place of `mixer_kernels.common.stored`: the configurations of its operators."""
    operators = sorted({parts[1] for m in modules if (parts := m.split("."))[0] == "mixer_kernels" and len(parts) == 3})
    found = {op: stored_configurations(op) for op in operators if op != "common"}
    return "\n".join(
        [
            '"""The launch configurations of the kernels."""',
            "",
            f"CONFIGURATIONS = {pprint.pformat(found, width=120, compact=True)}",
            "",
            "",
            "def stored_configurations(op: str) -> dict:",
            "    return CONFIGURATIONS[op]",
            "",
        ]
    )


def rewrite(module: str, roots: frozenset[str]) -> Rewritten:
    """`module` with its imports of modules under `roots` made relative."""
    path = source_path(module)
    text = path.read_text(encoding="utf-8")
    needed: list[str] = []
    edits = []
    for node, checked_only in _imports(ast.parse(text)):
        names = _project_modules(node, module, roots)
        if not names:
            continue
        if checked_only:
            edits.append((node, "pass"))
        else:
            edits.append((node, _relative(node, module, path)))
            needed += names
    return Rewritten(_edit(text, edits), needed)


def source_path(module: str) -> Path:
    """The file of a module; UserError if it is not written in Python."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise UserError(f"module {module} has no Python source: the model cannot be exported with its code.")
    return Path(spec.origin)


def _imports(tree: ast.Module) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Every import, and whether it is for type checkers only."""

    def walk(node: ast.AST, checked: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import | ast.ImportFrom):
                yield child, checked
            else:
                typing = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
                yield from walk(child, checked or typing)

    return walk(tree, False)


def _names(node: ast.Import | ast.ImportFrom, module: str) -> list[str]:
    """Absolute names of the modules that an import statement mentions."""
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else [_origin(node, module)]


def _origin(node: ast.ImportFrom, module: str) -> str:
    """The absolute name of the module after ``from``."""
    if node.level == 0:
        return node.module
    is_package = source_path(module).name == "__init__.py"
    parts = module.split(".")[: None if node.level == 1 and is_package else -(node.level - is_package)]
    return ".".join([*parts, node.module] if node.module else parts)


def _project_modules(node: ast.Import | ast.ImportFrom, module: str, roots: frozenset[str]) -> list[str]:
    """The modules under `roots` that an import statement needs: each the one that defines, or is, what is imported."""
    names = [name for name in _names(node, module) if name.split(".")[0] in roots]
    if isinstance(node, ast.Import) or not names:
        return names
    inside = {alias.name: _submodule(names[0], alias.name) for alias in node.names}
    found = [m for m in inside.values() if m]
    return found if len(found) == len(inside) else [names[0], *found]


def _submodule(package: str, name: str) -> str | None:
    """``package.name`` if that is a module and not a name that the package defines."""
    path = source_path(package)
    if path.name != "__init__.py" or name in _defined(package):
        return None
    full = f"{package}.{name}"
    return full if importlib.util.find_spec(full) is not None else None


@functools.cache
def _defined(package: str) -> frozenset[str]:
    """Names that a package's ``__init__.py`` defines, or imports from other modules than itself."""
    found: set[str] = set()
    for node in ast.parse(source_path(package).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and _origin(node, package) == package:
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return frozenset(found)


def _relative(node: ast.Import | ast.ImportFrom, module: str, path: Path) -> str:
    """The statement with a flat, relative module; several statements are joined by semicolons."""
    if isinstance(node, ast.Import):
        return "; ".join(_relative_import(alias, path, node.lineno) for alias in node.names)
    origin = _origin(node, module)
    submodules = {a.name: _submodule(origin, a.name) for a in node.names}
    parts = [f"from . import {flat(m)} as {a.asname or a.name}" for a in node.names if (m := submodules[a.name])]
    rest = [f"{a.name} as {a.asname}" if a.asname else a.name for a in node.names if not submodules[a.name]]
    return "; ".join([*parts, f"from .{flat(origin)} import {', '.join(rest)}"] if rest else parts)


def _relative_import(alias: ast.alias, path: Path, line: int) -> str:
    """``import a.b as c`` -> ``from . import a_b as c``."""
    if "." in alias.name and alias.asname is None:
        raise UserError(f"{path}:{line}: write 'from ... import ...' for {alias.name}, so that it can be exported.")
    return f"from . import {flat(alias.name)} as {alias.asname or alias.name}"


def _edit(text: str, edits: list[tuple[ast.stmt, str]]) -> str:
    """Replace statements by others; positions of the syntax tree count UTF-8 bytes."""
    lines = text.encode().splitlines(keepends=True)
    before = [0]
    for line in lines:
        before.append(before[-1] + len(line))
    content = text.encode()
    for node, new in sorted(edits, key=lambda edit: edit[0].lineno, reverse=True):
        begin = before[node.lineno - 1] + node.col_offset
        end = before[node.end_lineno - 1] + node.end_col_offset
        content = content[:begin] + new.encode() + content[end:]
    return content.decode()
