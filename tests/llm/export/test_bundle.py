"""The bundler's rewriting of imports."""

from __future__ import annotations

import pytest

from llm.errors import UserError
from llm.export.bundle import bundle


@pytest.fixture
def package(tmp_path, monkeypatch):
    """package("name", {"a.py": text}): a package of files that can be imported."""

    def make(package: str, files: dict[str, str]) -> None:
        for name, text in {"__init__.py": "", **files}.items():
            path = tmp_path / package / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    monkeypatch.syspath_prepend(str(tmp_path))
    return make


def test_a_mixer_from_another_package_brings_its_modules(package):
    package(
        "elsewhere",
        {
            "mixer.py": "import math\n"
            "import elsewhere.tools as tools\n"
            "from elsewhere import helper, sub as other  # both\n"
            "from .sub import (\n    deep,\n)\n"
            "from elsewhere import CONSTANT\n"
            "from llm.mixers.base import TokenMixer\n"
            "class Mine(TokenMixer): pass\n",
            "__init__.py": "CONSTANT = 'ü'; from mixer_kernels import Segments\n",
            "helper.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from llm.config import X\n",
            "tools.py": "def lazy():\n    from elsewhere.fast import go\n    import elsewhere.late as late\n",
            "late.py": "",
            "fast.py": "import triton\n",
            "sub/__init__.py": "from ..helper import *\nfrom . import deep\n",
            "sub/deep.py": "",
        },
    )
    files = bundle("llm.export.modeling_mixlab", ["elsewhere.mixer.Mine"])
    assert files["elsewhere_mixer.py"].splitlines() == [
        "import math",
        "from . import elsewhere_tools as tools",
        "from . import elsewhere_helper as helper; from . import elsewhere_sub as other  # both",
        "from . import elsewhere_sub_deep as deep",
        "from .elsewhere import CONSTANT",
        "from .llm_mixers_base import TokenMixer",
        "class Mine(TokenMixer): pass",
    ]
    assert files["elsewhere_sub.py"] == "from .elsewhere_helper import *\nfrom . import elsewhere_sub_deep as deep\n"
    assert files["elsewhere_helper.py"].endswith("if TYPE_CHECKING:\n    pass\n")
    assert "    from .elsewhere_fast import go\n" in files["elsewhere_tools.py"]
    assert {"elsewhere_late.py", "elsewhere_fast.py", "mixer_kernels.py"} <= files.keys()
    assert "llm_config.py" not in files
    for text in files.values():
        compile(text, "bundled", "exec")


def test_an_import_without_relative_form_is_refused(package):
    package("third", {"mixer.py": "import third.tools\n", "tools.py": ""})
    with pytest.raises(UserError, match=r"mixer\.py:1: write 'from \.\.\. import"):
        bundle("llm.export.modeling_mixlab", ["third.mixer.Mine"])


def test_classes_of_torch_are_imported_not_bundled():
    files = bundle("llm.export.modeling_mixlab", ["torch.nn.GELU"])
    assert "import torch.nn\n" in files["llm_export_targets.py"]
    assert not any("torch" in name for name in files)
