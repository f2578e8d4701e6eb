"""PrefixIndex: which beginnings of texts are known, and in which blocks of the KV cache they lie. Integers only.

A key depends on everything before it, so what a block holds is its own tokens and all that they follow. That makes a
tree: a node is the tokens of a full block, behind the node that they follow, and the way down to it spells a whole
beginning. Comparing tokens is exact, where a hash could be fooled.

    the root
    ├── 5 8 1 9, in block 3
    └── 7 7 7 2, evicted
        └── 4 0 4 0, in block 6

A node knows the block its content lies in, one for each group of layers (`blocks.py`), or None since that was evicted.
It stays as long as it has a block, or a child: whoever reads the child's text must pass it, whether or not its own keys
and values are there: in layers that see only a window they are of no use any more.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf


class Node:
    """A known beginning of a text, in whole blocks.

    Attributes
    ----------
    parent : the beginning that is one block shorter; None of the root, which is the beginning of all texts.
    tokens : its last block's.
    blocks : where that block's keys and values lie, of each group of layers, or None.
    children : the beginnings that are one block longer, by their last block's tokens.
    root : of the tree that it belongs to.
    """

    __slots__ = ("blocks", "children", "parent", "root", "tokens")

    def __init__(self, num_groups: int, parent: Node | None = None, tokens: tuple[int, ...] = ()):
        self.parent, self.tokens = parent, tokens
        self.blocks: list[int | None] = [None] * num_groups
        self.children: dict[tuple[int, ...], Node] = {}
        self.root: Node = self if parent is None else parent.root

    @property
    def is_empty(self) -> bool:
        """Whether its keys and values are nowhere any more."""
        return all(block is None for block in self.blocks)

    def __repr__(self):
        length, node = 0, self
        while node.parent is not None:
            length, node = length + 1, node.parent
        named = ", ".join("none" if block is None else str(block) for block in self.blocks)
        where = "no block" if self.is_empty else f"block{'s' if len(self.blocks) > 1 else ''} {named}"
        return f"Node({length} blocks long, {where}, {len(self.children)} children)"


class PrefixIndex:
    """The tree, and the way back from a block to its node.

    Attributes
    ----------
    block_size : tokens of a node.
    num_groups : blocks of a node.
    root : what all texts begin with: nothing.
    """

    def __init__(self, block_size: int, num_groups: int = 1):
        self.block_size, self.num_groups = block_size, num_groups
        self.reset()

    def follow(self, token_ids: SequenceOf[int]) -> list[Node]:
        """The way down the tree that `token_ids` spell, as far as it is known: the root, then a node a whole block."""
        nodes = [self.root]
        for start in range(0, len(token_ids) - self.block_size + 1, self.block_size):
            node = nodes[-1].children.get(tuple(token_ids[start : start + self.block_size]))
            if node is None:
                break
            nodes.append(node)
        return nodes

    def add(self, parent: Node | None, token_ids: SequenceOf[int], blocks: SequenceOf[int]) -> Node | None:
        """The node of `token_ids` behind `parent`; they lie in `blocks`, unless it knows others that hold the same.

        None if `parent` is, or stood in the tree before it was cleared: a beginning must be known from its beginning.
        """
        if parent is None or parent.root is not self.root:
            return None
        node = self._child(self._regrown(parent), tuple(token_ids))
        for group, block in enumerate(blocks):
            if node.blocks[group] is None:
                node.blocks[group], self._nodes[block] = block, node
        return node

    def evict(self, block: int) -> None:
        """The content of `block` is given up. A node without any goes, and those before it that nothing needs."""
        node = self._nodes.pop(block)
        node.blocks[node.blocks.index(block)] = None
        while node.parent is not None and node.is_empty and not node.children:
            del node.parent.children[node.tokens]
            node = node.parent

    def reset(self) -> None:
        """Nothing is known any more."""
        self.root = Node(self.num_groups)
        self._nodes: dict[int, Node] = {}  # by the block that holds its content

    def __contains__(self, block: int) -> bool:
        return block in self._nodes

    def __len__(self) -> int:
        """Blocks whose content is known."""
        return len(self._nodes)

    def __repr__(self):
        return f"PrefixIndex({len(self)} blocks of {self.block_size} tokens known)"

    def _regrown(self, node: Node) -> Node:
        """`node`, or the one in its place, standing in the tree: it may have gone while somebody went on behind it."""
        gone: list[Node] = []
        while node.parent is not None and node.parent.children.get(node.tokens) is not node:
            gone.append(node)
            node = node.parent
        for other in reversed(gone):
            node = self._child(node, other.tokens)
        return node

    def _child(self, node: Node, tokens: tuple[int, ...]) -> Node:
        """The node of `tokens` behind `node`, made if there is none."""
        if tokens not in node.children:
            node.children[tokens] = Node(self.num_groups, node, tokens)
        return node.children[tokens]
