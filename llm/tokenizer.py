"""The tokenizer: loaded through transformers, checked, identified by a fingerprint, and trained."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from llm.errors import UserError
from llm.paths import resolve

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

    from llm.config import TokenizerConfig

END_OF_DOCUMENT = "<|endoftext|>"  # what `train_bpe` names its only special token


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer at `path`, a folder (never the network) or a hub name.

    Raises UserError when there is none, or when it has no end-of-document (EOS) token.
    """
    from transformers import AutoTokenizer

    where = resolve(path)
    local = Path(where).exists() or where.startswith((".", "/")) or where.count("/") > 1
    if local and not Path(where).is_dir():
        raise UserError(f"tokenizer.path={path}: no such folder. Give a folder with tokenizer.json, or a hub name.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(where, local_files_only=local, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"tokenizer.path={path}: no tokenizer that transformers can load there ({reason}).") from error
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"tokenizer.path={path}: the tokenizer has no eos_token, which ends each document. "
            'Name one in its tokenizer_config.json ("eos_token").'
        )
    return tokenizer


def vocabulary_size(config: TokenizerConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    """How many tokens the model has to know. UserError when the tokenizer makes more than `vocab_size` says."""
    if config.vocab_size is not None and len(tokenizer) > config.vocab_size:
        raise UserError(
            f"tokenizer.vocab_size={config.vocab_size}: the tokenizer at {config.path} has {len(tokenizer)} tokens. "
            f"Set tokenizer.vocab_size={len(tokenizer)} or null, or take the tokenizer that was meant (tokenizer.path)."
        )
    return config.vocab_size or len(tokenizer)


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """16 hex digits that change whenever the tokenizer would cut some text differently."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        content = backend.to_str()
    else:
        content = json.dumps(sorted(tokenizer.get_vocab().items()))
    content += f"|{tokenizer.eos_token_id}|{tokenizer.bos_token_id}"
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE (Sennrich et al. 2016; Radford et al. 2019 for bytes) of `vocab_size` tokens.

    Any text survives encoding and decoding. One special token, `END_OF_DOCUMENT`, has number 0. The same texts in the
    same order give the same tokenizer.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write `folder` so that transformers' AutoTokenizer loads it."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_DOCUMENT,
        "clean_up_tokenization_spaces": False,
    }
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
