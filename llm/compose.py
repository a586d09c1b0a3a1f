"""From the words of a command line to a `TrainConfig`: Hydra composes, this module checks and explains."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from llm.config import TrainConfig, check_values
from llm.errors import UserError, suggest
from llm.layout import layer_names
from llm.paths import configs_dir

ConfigStore.instance().store("schema", node=TrainConfig)
# ${halved:...}: two states that share the size of one, so that mixers match
OmegaConf.register_new_resolver("halved", lambda size: size // 2, replace=True)

SWEEP_GROUPS = ("launcher", "sweep")  # in this order their files fill the settings of a sweep
HYBRID_ALIAS = re.compile(r"hybrid_(?P<linear>\w+)_(?P<ratio>\d+)to1")


def compose(overrides: Sequence[str]) -> TrainConfig:
    """The configuration that command-line words such as ``mixer=gdn`` or ``optim.lr=1e-3`` describe.

    Raises UserError naming the key and the remedy for an unknown key, choice or ill-typed value.
    """
    words = [part for word in overrides for part in expand_alias(word)]
    if _names_plain_mixer(words):  # an experiment may have chosen a hybrid
        words.append("hybrid.per_softmax=null")
    _check_words(words)
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(configs_dir()), version_base="1.3"):
        try:
            return _typed(_compose_with_mixers(words))
        except (HydraException, OmegaConfBaseException) as error:
            raise UserError(explain(error)) from error


def expand_alias(word: str) -> list[str]:
    """``mixer=hybrid_gdn_3to1`` -> ``mixer=hybrid hybrid.linear=gdn hybrid.per_softmax=3``; other words unchanged."""
    key, _, value = word.partition("=")
    match = HYBRID_ALIAS.fullmatch(value) if key == "mixer" else None
    if match is None:
        return [word]
    return ["mixer=hybrid", f"hybrid.linear={match['linear']}", f"hybrid.per_softmax={match['ratio']}"]


def _names_plain_mixer(words: Sequence[str]) -> bool:
    """Is a mixer chosen that is no hybrid, and no ratio given?"""
    chosen = {key: value for key, _, value in (word.partition("=") for word in words)}
    return "hybrid.per_softmax" not in chosen and chosen.get("mixer", "hybrid") != "hybrid"


def groups(*, of_sweeps: bool = False) -> dict[str, list[str]]:
    """The config groups of a run, or those of sweeps alone, and their choices, read from the folders."""
    folders = (f for f in configs_dir().iterdir() if f.is_dir() and (f.name in SWEEP_GROUPS) == of_sweeps)
    return {f.name: sorted(p.stem for p in f.glob("*.yaml")) for f in sorted(folders)}


def _compose_with_mixers(words: list[str]) -> DictConfig:
    """Compose; then, where the layout uses mixers whose files were not chosen (hybrids), once more with those too."""
    settings = [w for w in words if w.lstrip("+~").startswith("mixers.")]
    rest = [w for w in words if w not in settings]
    first = hydra_compose("train", overrides=rest, return_hydra_config=True)
    chosen = first.hydra.runtime.choices.mixer
    chosen = list(chosen) if OmegaConf.is_list(chosen) else [c for c in re.split(r"[\[\], ]+", str(chosen)) if c]
    added = [w.split("=")[0].split(".")[1] for w in settings if w.startswith("+")]
    missing = [n for n in dict.fromkeys(layer_names(_typed(first, partly=True))) if n not in (*first.mixers, *added)]
    known = groups()["mixer"]
    for name in missing:
        if name not in known:
            raise UserError(f"mixer {name!r} is not known.{suggest(name, known)}")
    if missing:
        rest = [w for w in rest if not w.startswith("mixer=")] + [f"mixer=[{','.join([*missing, *chosen])}]"]
    return hydra_compose("train", overrides=rest + settings)


def _typed(composed: DictConfig, *, partly: bool = False) -> TrainConfig:
    """The dataclass tree; without `partly`, every mandatory value must be there and interpolations are resolved."""
    known = list(TrainConfig.__dataclass_fields__)
    for key in composed:
        if key not in (*known, "hydra"):
            raise UserError(f"{key}: there is no such key.{suggest(str(key), all_keys())}")
    # as plain values, or keys that a plus added to a typed node would pass
    chosen = OmegaConf.masked_copy(composed, known)
    merged = OmegaConf.merge(OmegaConf.structured(TrainConfig), OmegaConf.to_container(chosen))
    if not partly:
        missing = sorted(OmegaConf.missing_keys(chosen))  # merging lets a default take the place of what is missing
        if missing:
            raise UserError(f"{missing[0]}: no value is given. Set {missing[0]}=... on the command line.")
        OmegaConf.resolve(merged)
        config = OmegaConf.to_object(merged)
        check_values(config)
        return config
    return merged


def _check_words(words: Sequence[str]) -> None:
    for word in words:
        if "=" not in word and not word.startswith("~"):
            raise UserError(f"{word!r} is not of the form key=value. See --help for the keys.")
        key, _, value = word.partition("=")
        if key in SWEEP_GROUPS:
            raise UserError(f"{word} is of a sweep. Put -m before it.")
        choices = groups().get(key.lstrip("+"))
        if choices is not None:
            _check_choices(key, value, choices)


def _check_choices(key: str, value: str, choices: list[str]) -> None:
    names = [v for v in re.split(r"[\[\], ]+", value) if v]
    if not names:
        raise UserError(f"{key}=: no choice is given.{suggest('', choices)}")
    for name in names:
        if name not in choices and name != "null":
            form = " Hybrids are named hybrid_X_Nto1." if name.startswith("hybrid") else ""
            raise UserError(f"{key}={name}: there is no such choice.{suggest(name, choices)}{form}")
    if len(names) > 1 and not value.startswith("["):
        raise UserError(f"{key}={value}: several choices are a sweep. Put -m before them, or take one.")


def explain(error: Exception) -> str:
    """Hydra's and OmegaConf's errors in our words: key, value, remedy."""
    if isinstance(error, OverrideParseException):
        return f"{error.override!r} cannot be read: check quotes, brackets and commas."
    text = str(error)
    cause: Any = error.__cause__ or error
    key = getattr(cause, "full_key", None) or _search(r"full_key: (\S+)", text) or _search(r"override '?([\w.]+)", text)
    missing = _search(r"Missing mandatory value: (\S+)", text)
    if missing or isinstance(cause, MissingMandatoryValue):
        return f"{missing or key}: no value is given. Set {missing or key}=... on the command line."
    if "Ambiguous value" in text:
        return f"{text.splitlines()[0].partition(' has been')[0]}: several values are a sweep. Put -m before them."
    if "not in" in str(cause) or "Could not override" in text or "is not in struct" in text:
        return f"{key}: there is no such key.{suggest(str(key), [*all_keys(), *mixer_keys()])}"
    return f"{key}: {str(cause).splitlines()[0]}" if key else text.splitlines()[0]


def all_keys() -> list[str]:
    """Every key of the typed configuration, in dotted form."""
    keys: list[str] = []

    def walk(node: DictConfig, prefix: str) -> None:
        for name in node:
            keys.append(f"{prefix}{name}")
            child = None if OmegaConf.is_missing(node, name) else node[name]
            if isinstance(child, DictConfig):
                walk(child, f"{prefix}{name}.")

    walk(OmegaConf.structured(TrainConfig), "")
    return keys


def mixer_keys() -> list[str]:
    """The settings of the mixers in configs/mixer, as mixers.<name>.<setting>."""
    files = (OmegaConf.load(path) for path in (configs_dir() / "mixer").glob("*.yaml"))
    settings = [(name, leaf) for file in files for name, leaf in file.get("mixers", {}).items()]
    return [f"mixers.{name}.{setting}" for name, leaf in settings for setting in leaf]


def _search(pattern: str, text: str) -> str | None:
    found = re.search(pattern, text)
    return found.group(1) if found else None
