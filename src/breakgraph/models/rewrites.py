"""Rewrites of a block's graph that Inductor lowers badly or cannot lower: handed to Inductor as a custom pass.

They look for arithmetic, not for models. What they do not recognise stays Inductor's.

- Heads that are normalised and turned by their positions: Inductor reads and multiplies each element several times.
  Queries with keys, in one kernel.
- A sum with a matrix product that nobody else reads is added up in the product, in place.
- What is added to the result of a mixture's experts is added where they combine their parts.
- Other products with a weight are left to an operator that has kernels for few rows.
- The largest few of short rows, with the softmax of the rows where only they are read: Inductor calls a sort.
"""

from __future__ import annotations

import sys
from operator import getitem
from typing import Any, TypeGuard

import torch
from torch import Tensor, fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.lowering import make_fallback
from torch._inductor.pattern_matcher import (
    CallFunction,
    KeywordArg,
    Match,
    PatternMatcherPass,
    register_graph_pattern,
)

from breakgraph.models import expert_ops as expert_ops_file
from breakgraph.models import few_rows as few_rows_file
from breakgraph.models import norm_rope as norm_rope_file
from breakgraph.models import top_k as top_k_file
from breakgraph.models.expert_ops import added_experts, gated_experts
from breakgraph.models.few_rows import DTYPES, add_product, few_rows_product
from breakgraph.models.norm_rope import norm_rope, norm_rope_pair
from breakgraph.models.top_k import MAX_COLUMNS, MAX_K, top_k

aten, prims = torch.ops.aten, torch.ops.prims
_RESHAPES = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)

# Known before the first graph is lowered: what it updates is then computed once, and not again by whoever reads it.
make_fallback(add_product, warn=False)
make_fallback(few_rows_product, warn=False)


class BlockRewrites(CustomGraphPass):
    """A pass over the graph that Inductor is about to lower, for `post_grad_custom_pre_pass`."""

    def __call__(self, graph: fx.Graph) -> None:
        _patterns.apply(graph)
        _turn_together(graph)
        for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
            _add_in_place(graph, node)
        for node in graph.find_nodes(op="call_function", target=gated_experts):
            _add_to_experts(graph, node)
        # Behind both kinds of sums: one takes its product along, the other leaves a product that is in no sum any more.
        for node in graph.find_nodes(op="call_function", target=aten.mm.default):
            _choose_by_rows(graph, node)
        for node in graph.find_nodes(op="call_function", target=aten.topk.default):
            _select_in_registers(graph, node)
        graph.eliminate_dead_code()

    def uuid(self) -> Any:
        files = (expert_ops_file, few_rows_file, norm_rope_file, top_k_file)
        return get_hash_for_files((__file__, *(file.__file__ for file in files)))


def _heads_pattern() -> Any:
    """x [1, T, heads, D] to [1, heads, T, D], as `transformers` spells it."""
    wide = CallFunction(prims.convert_element_type.default, KeywordArg("x"), torch.float32, _users=2)
    mean = CallFunction(aten.mean.dim, CallFunction(aten.pow.Tensor_Scalar, wide, 2), [-1], True)
    scale = CallFunction(aten.rsqrt.default, CallFunction(aten.add.Tensor, mean, KeywordArg("eps")))
    scaled = CallFunction(aten.mul.Tensor, wide, scale)
    narrow = CallFunction(prims.convert_element_type.default, scaled, KeywordArg("dtype"))
    weighted = CallFunction(aten.mul.Tensor, KeywordArg("weight"), narrow)
    heads = CallFunction(aten.permute.default, weighted, [0, 2, 1, 3], _users=3)
    second = CallFunction(aten.slice.Tensor, heads, 3, KeywordArg("start"), sys.maxsize)
    first = CallFunction(aten.slice.Tensor, heads, 3, 0, KeywordArg("end"))
    turned = CallFunction(aten.cat.default, [CallFunction(aten.neg.default, second), first], -1)
    return CallFunction(
        aten.add.Tensor,
        CallFunction(aten.mul.Tensor, heads, KeywordArg("cos")),
        CallFunction(aten.mul.Tensor, turned, KeywordArg("sin")),
    )


def _is_rope(match: Match) -> bool:
    """Halves are halves, every token has its own angles, and nothing broadcasts that only looks alike."""
    x, weight, cos, sin = (match.kwargs[name].meta["val"] for name in ("x", "weight", "cos", "sin"))
    _, num_tokens, _, head_dim = x.shape
    is_power = head_dim >= 2 and head_dim & (head_dim - 1) == 0
    halves = 2 * match.kwargs["start"] == 2 * match.kwargs["end"] == head_dim
    angles = (1, 1, num_tokens, head_dim)
    same_shapes = x.shape[0] == 1 and weight.shape == (head_dim,) and cos.shape == sin.shape == angles
    same_dtypes = {weight.dtype, cos.dtype, sin.dtype, match.kwargs["dtype"]} == {x.dtype}
    return bool(is_power and halves and same_shapes and same_dtypes and isinstance(match.kwargs["eps"], float))


_patterns = PatternMatcherPass(pass_name="breakgraph")


@register_graph_pattern(_heads_pattern(), extra_check=_is_rope, pass_dict=_patterns)
def _replace_heads(
    match: Match, x: fx.Node, weight: fx.Node, cos: fx.Node, sin: fx.Node, eps: float, **_: Any
) -> None:  # fmt: skip
    def replacement(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads: Tensor = norm_rope(x, weight, cos, sin, eps)
        return heads.transpose(1, 2)

    match.replace_by_example(replacement, [x, weight, cos, sin])


def _turn_together(graph: fx.Graph) -> None:
    """Heads that are turned by the same angles, two at a time."""
    waiting: dict[Any, fx.Node] = {}
    for node in graph.find_nodes(op="call_function", target=norm_rope):
        angles = node.args[2:4]
        first = waiting.pop(angles, None)
        if first is None or not _move_inputs(graph, node, first):
            waiting[angles] = node
            continue
        (x, weight, _, _, eps), (other, other_weight, _, _, other_eps) = first.args, node.args
        with graph.inserting_before(first):
            both = graph.call_function(
                norm_rope_pair, (x, weight, eps, other, other_weight, other_eps, *angles)
            )
            parts = [graph.call_function(getitem, (both, i)) for i in range(2)]
        both.meta["val"] = (first.meta["val"], node.meta["val"])
        for old, new in zip((first, node), parts, strict=True):
            new.meta["val"] = old.meta["val"]
            old.replace_all_uses_with(new)
            graph.erase_node(old)


def _move_inputs(graph: fx.Graph, node: fx.Node, place: fx.Node) -> bool:
    """Move all that `node` is computed from ahead of `place`; False, and nothing moved, where that is not possible."""
    needed: set[fx.Node] = set()
    left = list(node.all_input_nodes)
    while left:
        one = left.pop()
        if one not in needed and not one < place:
            needed.add(one)
            left += one.all_input_nodes
    if place in needed or any(one.is_impure() or one.op == "placeholder" for one in needed):
        return False
    for one in [one for one in graph.nodes if one in needed]:
        place.prepend(one)
    return True


def _add_in_place(graph: fx.Graph, node: fx.Node) -> None:
    """total + left @ right, where `total` was computed here and is read before this node only."""
    if len(node.args) != 2 or node.kwargs:
        return
    for total, product in (node.args, node.args[::-1]):
        factors = _factors(product)
        if factors is not None and _is_free(total, node) and _fits(total, product, factors[1]):
            # Added up once more: Inductor fuses readers with what they read, but not if that is updated afterwards. So
            # the others sum for themselves, and all of it becomes one kernel.
            with graph.inserting_before(total):
                own = graph.node_copy(total)
            with graph.inserting_before(node):
                updated = graph.call_function(
                    auto_functionalized, (add_product,), {"x": own, "left": factors[0], "right": factors[1]}
                )
                value = graph.call_function(getitem, (updated, 1))
            value.meta["val"] = node.meta["val"]
            updated.meta["val"] = (None, node.meta["val"])
            node.replace_all_uses_with(value)
            graph.erase_node(node)
            return


def _factors(product: Any) -> tuple[fx.Node, fx.Node] | None:
    """Of a matrix product, reshaped or not, that has one reader."""
    while isinstance(product, fx.Node) and product.target in _RESHAPES and len(product.users) == 1:
        product = product.args[0]
    if isinstance(product, fx.Node) and product.target is aten.mm.default and len(product.users) == 1:
        return product.args  # type: ignore[return-value]
    return None


def _is_free(total: Any, node: fx.Node) -> TypeGuard[fx.Node]:
    """`total` is a sum of this graph, which has memory of its own, and nobody reads it behind `node`."""
    if not isinstance(total, fx.Node) or total.target is not aten.add.Tensor:
        return False
    return all(other < node and not _may_alias(other) for other in set(total.users) - {node})


def _may_alias(node: fx.Node) -> bool:
    """Whether the result may lie on the memory of an argument, or is something that is not known here."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target in _RESHAPES:
        return True
    return any(result.alias_info is not None for result in node.target._schema.returns)


def _fits(total: fx.Node, product: Any, right: fx.Node) -> bool:
    """Nothing broadcasts, no type is promoted, and rows are rows."""
    before, added = total.meta["val"], product.meta["val"]
    is_same = before.shape == added.shape and before.dtype == added.dtype
    return bool(is_same and before.shape[-1] == right.meta["val"].shape[-1] and before.is_contiguous())


def _add_to_experts(graph: fx.Graph, experts: fx.Node) -> None:
    """residual + experts, where only this sum reads the experts' result.

    A sum that is only there to be added to something else is left to Inductor, which adds all of it up at once.
    """
    found = _only_reader(experts)
    if found is None:
        return
    result, node = found
    others = [arg for arg in node.args if arg is not result]
    if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2 or len(others) != 1:
        return
    residual, behind = others[0], _only_reader(node)
    if not isinstance(residual, fx.Node) or (behind is not None and behind[1].target is aten.add.Tensor):
        return
    looks = [one.meta["val"] for one in (residual, result, node)]
    if len({look.dtype for look in looks}) != 1 or any(look.shape != looks[0].shape for look in looks):
        return
    with graph.inserting_before(node):
        added = graph.call_function(added_experts, (residual, *experts.args))
    added.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(added)
    graph.erase_node(node)


def _only_reader(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """What alone reads `node`, reshaped or not, behind what it reads; None where there are several, or none."""
    while len(node.users) == 1:
        (reader,) = node.users
        if reader.target not in _RESHAPES:
            return node, reader
        node = reader
    return None


def _choose_by_rows(graph: fx.Graph, node: fx.Node) -> None:
    """x @ weight.T, where the weight is an argument of the graph."""
    x, turned = node.args
    if not (_is(turned, aten.permute.default) and turned.args[1] == [1, 0] and node.meta["val"].dtype in DTYPES):
        return
    weight = turned.args[0]
    # Inductor makes one product of a sum and a product without a reshape between them.
    if _is_argument(weight) and not any(_is(user, aten.add.Tensor) for user in node.users):
        with graph.inserting_before(node):
            product = graph.call_function(few_rows_product, (x, weight))
        product.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(product)
        graph.erase_node(node)


def _is_argument(node: Any) -> TypeGuard[fx.Node]:
    return isinstance(node, fx.Node) and node.op == "placeholder"


def _select_in_registers(graph: fx.Graph, node: fx.Node) -> None:
    """The k largest of each row of a matrix, or of their softmax."""
    scores: Any = node.args[0]
    k, dim, largest = [*node.args[1:], *(-1, True)[len(node.args) - 2 :]][:3]
    look = scores.meta["val"]
    is_matrix = look.dim() == 2 and dim in (1, -1) and look.dtype in (torch.float32, torch.bfloat16, torch.float16)
    is_short = isinstance(k, int) and isinstance(look.shape[-1], int) and k <= MAX_K and look.shape[-1] <= MAX_COLUMNS
    if not (is_matrix and is_short and largest) or node.kwargs:
        return
    inner = _softmax_of(scores)
    with graph.inserting_before(node):
        chosen = graph.call_function(top_k, (inner or scores, k, inner is not None))
    chosen.meta["val"] = tuple(node.meta["val"])
    node.replace_all_uses_with(chosen)
    graph.erase_node(node)
    _divide_by_sum(chosen)


def _divide_by_sum(chosen: fx.Node) -> None:
    """The shares of what top_k chose, rounded, where nobody reads the values themselves."""
    readers = [user for user in chosen.users if user.args[1] == 0]
    if len(readers) != 1 or readers[0].meta["val"].dtype != torch.float32:
        return
    (values,) = readers
    for share in values.users:
        if not _is(share, aten.div.Tensor) or share.args[0] is not values:
            continue
        total: Any = share.args[1]
        if not _is_along_rows(total, aten.sum.dim_IntList, values) or set(values.users) != {share, total}:
            continue
        reader = next(iter(share.users)) if len(share.users) == 1 else share
        rounded = reader if _is(reader, prims.convert_element_type.default) else share
        look = rounded.meta["val"]
        if len(total.users) == 1 and look.dtype.is_floating_point:
            chosen.args = (*chosen.args, True, look.dtype)
            chosen.meta["val"] = (look, chosen.meta["val"][1])
            values.meta["val"] = look
            rounded.replace_all_uses_with(values)
        return


def _softmax_of(node: fx.Node) -> fx.Node | None:
    """What `node` is the float32 softmax of, along the rows; None if it is something else, or has other readers."""
    if node.target is not aten.div.Tensor or len(node.users) != 1 or node.meta["val"].dtype != torch.float32:
        return None
    parts, total = node.args
    if not (_is(parts, aten.exp.default) and _is_along_rows(total, aten.sum.dim_IntList, parts)):
        return None
    difference = parts.args[0]
    if not _is(difference, aten.sub.Tensor):
        return None
    row, greatest = difference.args
    if not _is_along_rows(greatest, aten.amax.default, row):
        return None
    inner = row.args[0] if _is(row, prims.convert_element_type.default) else row
    return inner if isinstance(inner, fx.Node) and inner.meta["val"].dtype.is_floating_point else None


def _is(node: Any, target: object) -> TypeGuard[fx.Node]:
    return isinstance(node, fx.Node) and node.target is target


def _is_along_rows(node: Any, target: object, of: Any) -> bool:
    """Whether `node` reduces the rows of the matrix `of` to one element each, and keeps the axis and the dtype."""
    is_reduction = _is(node, target) and node.args[0] is of and not node.kwargs
    return is_reduction and node.args[1:] in (([1], True), ([-1], True))
