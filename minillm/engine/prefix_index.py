"""PrefixIndex: which prefixes are in the KV cache, and in which blocks. Integers only.

A key depends on everything before it, so the content of a block is defined by its own tokens and all earlier ones. This
gives a tree: a node holds the tokens of one full block that follow its parent's tokens, and the path to it spells a
whole prefix. Tokens are compared one by one, which is exact; a hash could collide.

    root
    ├── 5 8 1 9, in block 3
    └── 7 7 7 2, evicted
        └── 4 0 4 0, in block 6

A node has one block per KV-cache group (`block_table.py`), or None where that block has been evicted. A node stays in
the tree as long as it has a block or a child. A node without blocks can still lead to its children: in groups with a
window, a query after the child does not read the evicted keys.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf


class Node:
    """A known prefix, in whole blocks.

    Attributes
    ----------
    parent : the prefix that is one block shorter; None for the root, which is the empty prefix.
    tokens : the tokens of its last block.
    blocks : for each KV-cache group, the block that holds the keys and values of these tokens, or None.
    children : the prefixes that are one block longer, by the tokens of their last block.
    root : the root of the node's tree.
    """

    __slots__ = ("blocks", "children", "parent", "root", "tokens")

    def __init__(self, num_groups: int, parent: Node | None = None, tokens: tuple[int, ...] = ()):
        self.parent, self.tokens = parent, tokens
        self.blocks: list[int | None] = [None] * num_groups
        self.children: dict[tuple[int, ...], Node] = {}
        self.root: Node = self if parent is None else parent.root

    @property
    def is_empty(self) -> bool:
        """Whether all blocks of the node have been evicted."""
        return all(block is None for block in self.blocks)

    def __repr__(self) -> str:
        length, node = 0, self
        while node.parent is not None:
            length, node = length + 1, node.parent
        listed = ", ".join("none" if block is None else str(block) for block in self.blocks)
        blocks = "no block" if self.is_empty else f"block{'s' if len(self.blocks) > 1 else ''} {listed}"
        return f"Node({length} blocks long, {blocks}, {len(self.children)} children)"


class PrefixIndex:
    """The tree of known prefixes, and a map from each block to its node.

    Attributes
    ----------
    block_size : tokens per node.
    num_groups : KV-cache groups, and so blocks per node.
    root : the empty prefix, with which every text begins.
    """

    def __init__(self, block_size: int, num_groups: int = 1):
        self.block_size, self.num_groups = block_size, num_groups
        self.reset()

    def follow(self, token_ids: SequenceOf[int]) -> list[Node]:
        """Return the known path that `token_ids` spell: the root, then one node per whole block."""
        nodes = [self.root]
        for start in range(0, len(token_ids) - self.block_size + 1, self.block_size):
            node = nodes[-1].children.get(tuple(token_ids[start : start + self.block_size]))
            if node is None:
                break
            nodes.append(node)
        return nodes

    def add(self, parent: Node | None, token_ids: SequenceOf[int], blocks: SequenceOf[int]) -> Node | None:
        """Add the prefix that continues `parent` by one block of tokens.

        Parameters
        ----------
        parent : the prefix that is one block shorter.
        token_ids : the `block_size` tokens that follow it.
        blocks : for each KV-cache group, the block that holds their keys and values. It is ignored if the index already
            lists another block with the same content.

        Returns
        -------
        The node; or None if `parent` is None or belongs to a tree from before a reset, because a prefix can only be
        found from its beginning.
        """
        if parent is None or parent.root is not self.root:
            return None
        node = self._child(self._restored(parent), tuple(token_ids))
        for group, block in enumerate(blocks):
            if node.blocks[group] is None:
                node.blocks[group], self._nodes[block] = block, node
        return node

    def evict(self, block: int) -> None:
        """Remove a block. A node without blocks and children is removed, and so are its ancestors of that kind."""
        node = self._nodes.pop(block)
        node.blocks[node.blocks.index(block)] = None
        while node.parent is not None and node.is_empty and not node.children:
            del node.parent.children[node.tokens]
            node = node.parent

    def reset(self) -> None:
        """Forget all prefixes."""
        self.root = Node(self.num_groups)
        self._nodes: dict[int, Node] = {}  # by block

    def __contains__(self, block: int) -> bool:
        return block in self._nodes

    def __len__(self) -> int:
        """Blocks that can be found."""
        return len(self._nodes)

    def __repr__(self) -> str:
        return f"PrefixIndex({len(self)} blocks of {self.block_size} tokens known)"

    def _restored(self, node: Node) -> Node:
        """Return `node` or, if it has been removed while a sequence continued from it, its replacement in the tree."""
        removed: list[Node] = []
        while node.parent is not None and node.parent.children.get(node.tokens) is not node:
            removed.append(node)
            node = node.parent
        for other in reversed(removed):
            node = self._child(node, other.tokens)
        return node

    def _child(self, node: Node, tokens: tuple[int, ...]) -> Node:
        """Return the child of `node` with these tokens, created if needed."""
        if tokens not in node.children:
            node.children[tokens] = Node(self.num_groups, node, tokens)
        return node.children[tokens]
