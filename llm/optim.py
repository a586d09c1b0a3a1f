"""Parameter groups by role, the optimizer over them, and its state by parameter name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from llm.config import OptimConfig
from llm.errors import UserError
from llm.sharding import shard_like

UNDECAYED_NAMES = ("bias", "A_log", "dt_bias")  # last part of a parameter's name; 1-D parameters have no decay either


def parameter_role(name: str, parameter: nn.Parameter, embeddings: set[int]) -> str:
    """The group that a parameter belongs to.

    embedding    embedding and output head
    vector       norms, biases, A_log, dt_bias, all 1-D
    convolution  all with more than two dimensions
    matrix       the rest: what Muon would train
    """
    if id(parameter) in embeddings:
        return "embedding"
    if parameter.ndim < 2 or name.rsplit(".", 1)[-1] in UNDECAYED_NAMES:
        return "vector"
    return "matrix" if parameter.ndim == 2 else "convolution"


def parameter_groups(model: nn.Module, config: OptimConfig) -> list[dict[str, Any]]:
    """Every trained parameter of `model` in exactly one group: {params, role, weight_decay}.

    The embedding and `model.head_weight` (tied or not) form a group of their own: their decay is
    `optim.embedding_weight_decay`, since rows of rare tokens get decay every step and gradient almost never.
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)} | {id(model.head_weight)}
    decays = {"matrix": config.weight_decay, "convolution": config.weight_decay, "vector": 0.0}
    decays["embedding"] = config.embedding_weight_decay
    members: dict[str, list[nn.Parameter]] = {role: [] for role in decays}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            members[parameter_role(name, parameter, embeddings)].append(parameter)
    groups = [{"params": members[role], "role": role, "weight_decay": decays[role]} for role in decays if members[role]]
    _assert_complete(model, groups)
    return groups


def _assert_complete(model: nn.Module, groups: list[dict[str, Any]]) -> None:
    grouped = [id(parameter) for group in groups for parameter in group["params"]]
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    assert len(grouped) == len(set(grouped)), "a parameter is in two groups"
    assert set(grouped) == trained, "a parameter is in no group"


def build_optimizer(config: OptimConfig, model: nn.Module, build_leaf: Callable[..., Any]) -> Optimizer:
    """The optimizer of `config.optimizer` over the parameter groups of `model`.

    ``build_leaf(key, settings)`` makes what a mapping with a `_target_` describes (`llm.build.build_leaf`). The class
    is called as ``Class(params=groups, lr=config.lr, **settings of the leaf)``. UserError where it refuses them.
    """
    # partial: Hydra would copy the parameters if they went through it as arguments
    factory = build_leaf("optim.optimizer", {**config.optimizer, "_partial_": True, "_convert_": "all"})
    try:
        optimizer = factory(params=parameter_groups(model, config), lr=config.lr)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"optim.optimizer: {error}") from error
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
    return optimizer


def set_learning_rate(optimizer: Optimizer, share: float) -> None:
    """Set every group to `share` of its peak learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * share


def optimizer_tensors(optimizer: Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The state of every parameter as ``'<entry>/<parameter name>'`` -> tensor; empty before the first step.

    What belongs to a sharded parameter is sharded too.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        f"{entry}/{names[id(parameter)]}": value
        for parameter, state in optimizer.state.items()
        for entry, value in state.items()
    }


def load_optimizer_tensors(optimizer: Optimizer, model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Take back what `optimizer_tensors` gave, gathered, whatever order of groups and sharding there was then."""
    parameters = dict(model.named_parameters())
    state_of: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        entry, name = key.split("/", 1)
        state_of.setdefault(name, {})[entry] = value
    names = {id(parameter): name for name, parameter in parameters.items()}
    ordered = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    unknown = state_of.keys() - set(ordered)
    if unknown:
        raise ValueError(f"the optimizer state has parameters that the model lacks: {', '.join(sorted(unknown))}")
    for name, entries in state_of.items():
        like = parameters[name]
        state_of[name] = {e: shard_like(like, v) if v.shape == like.shape else v for e, v in entries.items()}
    state = {index: state_of[name] for index, name in enumerate(ordered) if name in state_of}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
