"""Datasets of the Hugging Face hub: their files are found once and then read by ranges as they are needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from llm.data.files import SUFFIXES
from llm.data.order import digest
from llm.data.shards import Shard, open_shard
from llm.data.text import TextSource
from llm.errors import UserError

T = TypeVar("T")


class HubDataset(TextSource):
    """A split of a dataset of the hub, at a fixed revision, streamed.

    `path` is ORGANISATION/NAME, `subset` one of its configurations (None: the only or default one).
    """

    def __init__(
        self,
        path: str | None = None,
        subset: str | None = None,
        *,
        split: str = "train",
        validation_split: str | None = None,
        revision: str | None = None,
        text_column: str = "text",
    ) -> None:
        if not isinstance(path, str) or not path.strip():
            raise UserError(
                f"data.path={'' if path is None else path}: name a dataset of the hub, "
                "for example data.path=HuggingFaceFW/fineweb-edu."
            )
        self.path, self.subset, self.split, self.validation_split = path, subset, split, validation_split
        self.revision, self.text_column = revision, text_column
        self._files: dict[str, list[str]] | None = None

    def training_shards(self) -> list[Shard]:
        return self._shards(self.split)

    def validation_shards(self) -> dict[str, list[Shard]]:
        return {"validation": self._shards(self.validation_split)} if self.validation_split else {}

    def validates_itself(self) -> bool:
        return self.validation_split is not None

    def identity(self) -> str:
        return digest(self.text_column, self._urls(self.split))  # the URLs hold the commit

    def _shards(self, split: str) -> list[Shard]:
        return [open_shard(url, text_column=self.text_column) for url in self._urls(split)]

    def _urls(self, split: str) -> list[str]:
        if self._files is None:
            self._files = on_rank_0(lambda: resolve_files(self.path, self.subset, self.revision))
        if split not in self._files:
            raise UserError(f"data.source.split={split}: {self.path} has the splits {', '.join(sorted(self._files))}.")
        return self._files[split]


def resolve_files(repo: str, subset: str | None, revision: str | None) -> dict[str, list[str]]:
    """The URLs of a hub dataset's files by split, at the commit that `revision` (None: the newest) is now.

    Raises UserError for a name, subset or revision that is not there or not open to this user, and for files of a kind
    that cannot be read.
    """
    try:
        from datasets import load_dataset_builder
        from datasets.exceptions import DatasetNotFoundError
    except ImportError as error:
        raise UserError("data=hub needs the datasets library: pip install 'mixlab[data]'.") from error
    try:
        builder = load_dataset_builder(repo, name=subset, revision=revision)
    except DatasetNotFoundError as error:
        raise UserError(
            f"data.path={repo}: no such dataset for you on the hub (misspelt? gated: ask for access on its page and "
            f"log in with `hf auth login`). {_first_line(error)}"
        ) from error
    except (ValueError, FileNotFoundError) as error:
        raise UserError(f"data.path={repo} data.source.subset={subset}: {_first_line(error)}") from error
    except OSError as error:
        raise UserError(f"data.path={repo}: the hub cannot be reached ({_first_line(error)}).") from error
    files = builder.config.data_files or {}
    return {str(split): [_url(repo, str(file)) for file in found] for split, found in files.items()}


def _url(repo: str, file: str) -> str:
    """The URL of `hf://datasets/REPO@COMMIT/PATH`."""
    from huggingface_hub import hf_hub_url

    if not file.endswith(SUFFIXES):
        raise UserError(f"data.path={repo}: {file} is of a kind that is not read here. Known: {', '.join(SUFFIXES)}.")
    name, _, path = file.removeprefix("hf://datasets/").partition("@")
    commit, _, path = path.partition("/")
    return hf_hub_url(name, path, repo_type="dataset", revision=commit)


def on_rank_0(work: Callable[[], T]) -> T:
    """The result of `work`, done by rank 0 alone where there are several; a UserError there is one everywhere."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return work()
    found: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            found[0] = work()
        except UserError as error:
            found[1] = str(error)
    dist.broadcast_object_list(found)
    if found[1] is not None:
        raise UserError(found[1])
    return found[0]


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0]
