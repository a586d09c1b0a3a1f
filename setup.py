"""Everything is in pyproject.toml but this: the configs and the bundled data go along with a wheel."""

from pathlib import Path

from setuptools import setup


def data_files() -> list[tuple[str, list[str]]]:
    """Every file under configs/ and data/, to be installed below share/mixlab."""
    files = [p for top in ("configs", "data") for p in sorted(Path(top).rglob("*")) if p.is_file()]
    folders = sorted({p.parent for p in files})
    return [(f"share/mixlab/{folder}", [str(p) for p in files if p.parent == folder]) for folder in folders]


setup(data_files=data_files())
