"""From a configuration to objects. The only module that instantiates classes named by `_target_`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from hydra.utils import get_class, instantiate

from llm.config import TrainConfig
from llm.errors import UserError, suggest
from llm.layout import layer_names
from llm.mixers.base import TokenMixer
from llm.model.decoder import Decoder
from llm.model.residual import VALUE_ROUTING
from llm.sizing import mlp_width

SUPPLIED_BY_DECODER = ("self", "d_model", "layer_idx", "n_layers")


def build_model(config: TrainConfig, vocab_size: int, device: torch.device | str = "cpu") -> Decoder:
    """The decoder with fresh weights drawn from `config.seed` (none on the meta device).

    Weights are drawn on the CPU, so that they do not depend on the device. Raises UserError for settings that a mixer
    does not have or that do not fit together.
    """
    build_on = "meta" if str(device) == "meta" else "cpu"
    with torch.device(build_on):
        names, sizes = layer_names(config), config.model
        mixers = [build_mixer(config, name, i) for i, name in enumerate(names)]
        if config.residual == VALUE_ROUTING:  # before the MLPs take what is left of the parameters
            for mixer in mixers:
                mixer.route_values()
        model = Decoder(
            vocab_size,
            sizes.d_model,
            mixers,
            mlp_width(sizes, mixers),
            tie_embeddings=sizes.tie_embeddings,
            norm_eps=sizes.norm_eps,
            init_std=sizes.init_std,
            checkpointing=config.activation_checkpointing,
            residual=config.residual,
        )
    if build_on == "cpu":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            model.reset_parameters()
    return model.to(device)


def build_mixer(config: TrainConfig, name: str, layer_idx: int) -> TokenMixer:
    """The mixer `name` of layer `layer_idx`, from ``config.mixers[name]``."""
    settings = dict(config.mixers[name])
    check_settings(f"mixers.{name}", settings, SUPPLIED_BY_DECODER)
    sizes = config.model
    try:
        return instantiate(settings, d_model=sizes.d_model, layer_idx=layer_idx, n_layers=sizes.n_layers)
    except Exception as error:
        raise UserError(f"mixers.{name}: {_root(error)}") from error


def build_leaf(key: str, settings: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
    """An object from a leaf with a `_target_` (data source, optimizer, logger), checked against its signature."""
    check_settings(key, settings, ("self", *kwargs))
    try:
        return instantiate(dict(settings), *args, **kwargs)
    except UserError:
        raise
    except Exception as error:
        if isinstance(error.__cause__, UserError):
            raise error.__cause__ from error
        raise UserError(f"{key}: {_root(error)}") from error


def check_settings(key: str, settings: Mapping[str, Any], supplied: tuple[str, ...]) -> None:
    """UserError unless `settings` has a `_target_` that exists and takes every other setting."""
    target = settings.get("_target_")
    if not target:
        raise UserError(f"{key}._target_: not given. Name the class, for instance {key}._target_=package.module.Class.")
    try:
        parameters, open_ended = _parameters(get_class(target))
    except Exception as error:
        raise UserError(f"{key}._target_={target}: cannot be imported ({_root(error)}).") from error
    if open_ended:
        return
    known = [n for n in parameters if n not in supplied]
    for name in settings:
        if name not in known and not name.startswith("_"):
            raise UserError(f"{key}.{name}: {target.rsplit('.', 1)[-1]} has no such setting.{suggest(name, known)}")


def _parameters(kind: type) -> tuple[list[str], bool]:
    """Names that a class is built with, and whether there are others.

    Where it hands ``**kwargs`` on, those of the classes that it inherits from count too.
    """
    names: list[str] = []
    for ancestor in kind.__mro__:
        if "__init__" not in vars(ancestor):
            continue
        parameters = inspect.signature(ancestor.__init__).parameters.values()
        names += [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            return names, False
    return names, True


def _root(error: BaseException) -> str:
    """The first line of the innermost cause, without Hydra's wrapping."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error) or type(error).__name__).splitlines()[0]
