"""Small linear maps of one input, joined into one product where the model is compiled.

Gates and low-rank maps have a few outputs a token. Each alone reads its whole input, writes a gradient of that size,
and leaves most of a GPU idle. The model keeps them apart, with their names and parameters; only graphs are changed.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch._dynamo import lookup_backend
from torch._ops import HigherOrderOperator, OpOverload

SMALL = 256  # outputs of a map that is worth joining, with others of any size
LINEAR = (torch.nn.functional.linear, torch._C._nn.linear)
VIEWS = {"unflatten", "view", "flatten", "reshape", "transpose", "to", "contiguous", "unsqueeze"}


@functools.cache  # torch.compile makes a graph for every backend that is not the same object
def joining(backend: str) -> Callable[[fx.GraphModule, list[Any]], Any]:
    """The backend of torch.compile that joins, and leaves the rest to `backend`."""

    def compile_joined(graph: fx.GraphModule, inputs: list[Any]) -> Any:
        join_linears(graph)
        return lookup_backend(backend)(graph, inputs)

    return compile_joined


def join_linears(module: fx.GraphModule) -> int:
    """Join maps without bias that share an input, one of them small; returns how many joined products there are.

    Those whose output goes into an operator as it is stay apart: operators want it in one piece, and their gradients
    come in one, so that joining would copy.
    """
    count = 0
    for part in module.modules():  # what is recomputed has graphs of its own
        if isinstance(part, fx.GraphModule):
            found = list(_groups(part.graph))
            for nodes in found:
                _join(part.graph, nodes)
            if found:
                part.recompile()
            count += len(found)
    return count


def _groups(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """The maps of each input that are to be one."""
    groups: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if _is_plain_linear(node) and not any(map(_is_operator, _beyond_views(node))):
            groups.setdefault(node.args[0], []).append(node)
    for nodes in groups.values():
        if len(nodes) > 1 and min(map(_outputs, nodes)) <= SMALL:
            yield nodes


def _join(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    with graph.inserting_before(nodes[0]):
        weight = _call(graph, torch.cat, [node.args[1] for node in nodes])
        joined = _call(graph, torch.nn.functional.linear, nodes[0].args[0], weight)
        parts = _call(graph, torch.split, joined, [_outputs(node) for node in nodes], -1)
        for index, node in enumerate(nodes):
            node.replace_all_uses_with(_call(graph, operator.getitem, parts, index))
    for node in nodes:
        graph.erase_node(node)


def _call(graph: fx.Graph, function: Callable[..., Any], *args: Any) -> fx.Node:
    """A node that calls `function`, with what it would give as its example, as the compilers want it."""
    node = graph.call_function(function, args)
    node.meta["example_value"] = function(*fx.map_arg(args, _example))
    return node


def _example(node: fx.Node) -> Any:
    return node.meta["example_value"]


def _is_plain_linear(node: fx.Node) -> bool:
    if node.op != "call_function" or node.target not in LINEAR:
        return False
    given = len(node.args) == 2 or (len(node.args) == 3 and node.args[2] is None)
    return given and not node.kwargs and node.args[1].op in ("placeholder", "get_attr")


def _outputs(node: fx.Node) -> int:
    return _example(node).shape[-1]


def _beyond_views(node: fx.Node) -> Iterator[fx.Node]:
    """What uses a value, other than to see it in another shape or dtype."""
    for user in node.users:
        if user.op == "call_method" and user.target in VIEWS:
            yield from _beyond_views(user)
        else:
            yield user


def _is_operator(node: fx.Node) -> bool:
    target = node.target
    own = isinstance(target, OpOverload) and target.namespace not in ("aten", "prims")
    return own or isinstance(target, HigherOrderOperator)
