"""Where the project's own configs and bundled data are, in a checkout and in an installed wheel."""

from __future__ import annotations

import sys
from pathlib import Path

from llm.errors import UserError

BUNDLED = "bundled:"  # a path that begins with this is inside `data_dir()`: it means the same on every machine


def _project_folder(name: str) -> Path:
    """Folder `name` of the checkout, or the one that a wheel installs under `sys.prefix/share/mixlab`."""
    checkout = Path(__file__).resolve().parent.parent / name
    if (checkout.parent / "pyproject.toml").is_file() and checkout.is_dir():
        return checkout
    installed = Path(sys.prefix) / "share" / "mixlab" / name
    if installed.is_dir():
        return installed
    raise UserError(f"The project's folder {name}/ is neither at {checkout} nor at {installed}: install mixlab again.")


def configs_dir() -> Path:
    """The Hydra groups."""
    return _project_folder("configs")


def data_dir() -> Path:
    """The bundled corpus and its tokenizer."""
    return _project_folder("data")


def resolve(path: str | Path) -> str:
    """`path` with a leading `bundled:` replaced by the bundled data's folder and `~` by the home folder."""
    path = str(path)
    if path.startswith(BUNDLED):
        return str(data_dir() / path.removeprefix(BUNDLED))
    return str(Path(path).expanduser()) if path.startswith("~") else path
