"""From a folder or hub name of transformers to a run: the beginning of training, or of a hybrid."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

from llm.build import build_model
from llm.checkpoint import Snapshot
from llm.compose import compose
from llm.config import TrainConfig
from llm.errors import UserError
from llm.export.fla import TYPES, read_fla
from llm.export.foreign import Foreign, fit_vocabulary, linearised, read
from llm.model.residual import STANDARD
from llm.runfolder import RunFolder
from llm.state import load_model_tensors, model_tensors
from llm.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OWN_TYPE = "mixlab"


def import_model(source: str, out: Path | str, *, linear: str | None = None, per_softmax: int = 3) -> list[str]:
    """Make the new run folder `out` with the weights of `source` as step 0, and its tokenizer.

    `source` is a folder or hub name: an export of ours, native or self-contained (whose code is not run), or a Llama or
    Qwen3 model. With `linear`, a softmax model becomes a hybrid, `per_softmax` layers of that mixer to a softmax layer.
    Returns the words that describe the model on the training command. Raises UserError where it cannot be imported.
    """
    out = Path(out)
    if out.exists():
        raise UserError(f"{out} exists and is not overwritten. Choose another folder, or remove it.")
    tokenizer, model = load_tokenizer(source), read_source(source)
    words = describe(model, out / "tokenizer")
    if linear is not None:
        words = hybrid_words(model, words, linear, per_softmax)
    config = compose(words)
    weights = initial_weights(model, config, len(tokenizer), linear)
    save_run(out, config, weights, tokenizer)
    return words


def read_source(source: str) -> Foreign:
    """The model of a folder or hub name. Code that comes with it is never run."""
    path = Path(source) / "config.json"
    config = json.loads(path.read_text()) if path.is_file() else {}
    if config.get("model_type") == OWN_TYPE:
        return read_own(Path(source), config)
    if config.get("model_type") in {t.model_type for t in TYPES}:
        return read_fla(config, load_weights(Path(source)))
    try:
        loaded = AutoModelForCausalLM.from_pretrained(source, dtype="float32", trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UserError(f"{source}: cannot be loaded ({str(error).strip().splitlines()[0]}).") from error
    return read(loaded.config, loaded.state_dict())


def read_own(folder: Path, config: dict[str, Any]) -> Foreign:
    """A self-contained export: settings and weights are under our names already."""
    weights = {name.removeprefix("model."): tensor for name, tensor in load_weights(folder).items()}
    plain = PreTrainedConfig.from_dict(config)
    if getattr(plain, "residual", STANDARD) != STANDARD:
        raise UserError(f"{folder}: has residual={plain.residual}, which cannot be imported. Take the run itself.")
    sizes = {
        "d_model": plain.hidden_size,
        "n_layers": plain.num_hidden_layers,
        "mlp_width": plain.intermediate_size,
        "tie_embeddings": plain.tie_word_embeddings,
        "norm_eps": plain.rms_norm_eps,
        "init_std": plain.initializer_range,
    }
    return Foreign(plain.mixers, plain.mixer_types, sizes, weights, plain.max_position_embeddings)


def load_weights(folder: Path) -> dict[str, Tensor]:
    """The tensors of all safetensors files of a folder, as fp32. UserError where there are none."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(
            f"{folder}: holds no *.safetensors. Other weights (pickles) are not loaded: convert them first."
        )
    return {name: tensor.float() for file in files for name, tensor in load_file(file).items()}


def describe(model: Foreign, tokenizer: Path) -> list[str]:
    """The model as words of the training command."""
    blocks = sum(tensor.numel() for name, tensor in model.weights.items() if name.startswith(("layers.", "norm.")))
    sizes = {"name": "imported", "parameters": blocks, **model.sizes}
    heads = {"head_dim": "softmax", "linear_head_dim": next(iter(model.mixers))}
    for key, mixer in heads.items():
        settings = model.mixers.get(mixer, {})
        sizes[key] = settings.get("head_dim", settings.get("head_k_dim", 64))
    words = [f"model.{key}={_word(value)}" for key, value in sizes.items()]
    words += [f"pattern=[{','.join(model.pattern)}]", f"context={model.context}"]
    for mixer, settings in model.mixers.items():
        words += [f"mixers.{mixer}.{key}={_word(value)}" for key, value in settings.items()]
    return [*words, "tokenizer=folder", f"tokenizer.path={tokenizer}"]


def hybrid_words(model: Foreign, words: list[str], linear: str, per_softmax: int) -> list[str]:
    """The words of the hybrid, whose linear layers have heads like the softmax ones."""
    if set(model.pattern) != {"softmax"}:
        raise UserError("--linear: only a model whose layers are all softmax attention can become a hybrid.")
    settings = model.mixers["softmax"]
    own = {"num_heads": settings["num_heads"], "head_k_dim": settings["head_dim"], "expand_v": 1.0}
    return [
        *(word for word in words if not word.startswith("pattern=")),
        "mixer=hybrid",
        f"hybrid.linear={linear}",
        f"hybrid.per_softmax={per_softmax}",
        *(f"mixers.{linear}.{key}={_word(value)}" for key, value in own.items()),
    ]


def initial_weights(model: Foreign, config: TrainConfig, vocab_size: int, linear: str | None) -> dict[str, Tensor]:
    """Tensors of the decoder of `config`; UserError where one is missing, left over or of another shape."""
    decoder = build_model(config, vocab_size)
    weights = fit_vocabulary(model.weights, vocab_size, decoder.padded_vocab_size)
    if linear is not None:
        weights = linearised(model, weights, model_tensors(decoder))
    load_model_tensors(decoder, weights)
    return model_tensors(decoder)


def save_run(out: Path, config: TrainConfig, weights: dict[str, Tensor], tokenizer: PreTrainedTokenizerBase) -> None:
    """A run that has done no step."""
    run = RunFolder.open(out, config)
    try:
        tokenizer.save_pretrained(out / "tokenizer")
        run.checkpoints.save(Snapshot(weights, {}, {}, {"step": 0, "tokens": 0, "val_loss": None}), config.checkpoint)
    finally:
        run.close()


def _word(value: Any) -> str:
    """A value as Hydra reads it on a command line."""
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{_word(item)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(_word, value))}]"
    known: dict[Any, Callable[[Any], str]] = {bool: lambda v: str(v).lower(), type(None): lambda v: "null"}
    return known.get(type(value), str)(value)
