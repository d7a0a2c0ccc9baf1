"""Which full KV blocks hold which tokens, for requests that begin with the same ones.

One tree for each adapter. A node is a full block; the tokens on the way to it from the root are all the tokens that its
keys and values depend on. Tokens are compared as they are, so a match is never by accident.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from breakgraph.attention.kv_buffers import RESERVED_BLOCK

BlockTokens = tuple[int, ...]
"""The token ids of one full block."""


@dataclass(eq=False, slots=True)
class PrefixNode:
    """One cached block; a root holds none."""

    block: int
    token_ids: BlockTokens
    parent: PrefixNode | None
    children: dict[BlockTokens, PrefixNode] = field(default_factory=dict)
    is_cached: bool = True
    """False once it has left the tree; nothing can be put below it then."""


class PrefixCache:
    """Finds blocks by the tokens in them. Who uses a block, and when it is evicted, is the allocator's business.

    Every node can be reached from a root: whatever is below a node leaves the tree with it.
    """

    def __init__(self) -> None:
        self._roots: dict[str | None, PrefixNode] = {}
        self._nodes: dict[int, PrefixNode] = {}
        """By block."""

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, block: int) -> bool:
        return block in self._nodes

    def match(self, adapter_id: str | None, token_blocks: Iterable[BlockTokens]) -> tuple[list[int], PrefixNode]:
        """Blocks of the longest cached beginning of `token_blocks`, and the node to `insert` the next block below."""
        node = self._roots.get(adapter_id)
        if node is None:
            node = self._roots[adapter_id] = PrefixNode(RESERVED_BLOCK, (), None)
        blocks: list[int] = []
        for token_ids in token_blocks:
            child = node.children.get(token_ids)
            if child is None:
                break
            blocks.append(child.block)
            node = child
        return blocks, node

    def insert(self, parent: PrefixNode, token_ids: BlockTokens, block: int) -> PrefixNode:
        """Caches `block`, whose tokens follow those of `parent`, and returns the node for the block after it.

        When these tokens are cached already, or `parent` has left the tree, `block` stays uncached.
        """
        if not parent.is_cached:
            return parent
        node = parent.children.get(token_ids)
        if node is None:
            assert block not in self._nodes, f"block {block} is cached already"
            node = parent.children[token_ids] = self._nodes[block] = PrefixNode(block, token_ids, parent)
        return node

    def remove(self, block: int) -> list[int]:
        """Takes a block out of the tree, with all below it; returns the blocks that left."""
        node = self._nodes[block]
        assert node.parent is not None, "a root has no block"
        del node.parent.children[node.token_ids]
        return self._leave(node)

    def clear(self) -> list[int]:
        """Takes all blocks out, and returns them."""
        roots, self._roots = self._roots, {}
        return [block for root in roots.values() for block in self._leave(root)]

    def _leave(self, top: PrefixNode) -> list[int]:
        gone = [top]
        for node in gone:
            gone.extend(node.children.values())
        for node in gone:
            node.is_cached = False
            node.children = {}
        blocks = [node.block for node in gone if node.parent is not None]
        for block in blocks:
            del self._nodes[block]
        return blocks
