"""PrefixIndex: which beginnings of texts are known, and in which blocks of the KV cache they lie. Integers only.

A key depends on everything before it, so what a block holds is its own tokens and all that they follow. That makes a
tree: a node is the tokens of a full block, behind the node that they follow, and the way down to it spells a whole
beginning. Comparing tokens is exact, where a hash could be fooled.

    the root
    ├── 5 8 1 9, in block 3
    └── 7 7 7 2, evicted
        └── 4 0 4 0, in block 6

A node knows the block its content lies in, or None since that was evicted. It stays as long as it has a block, or a
child: whoever reads the child's text must pass it, whether or not its own keys and values are there. They are of no
use any more where all layers see only a window, and then are the first to go.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf


class Node:
    """A known beginning of a text, in whole blocks.

    Attributes
    ----------
    parent : the beginning that is one block shorter; None of the root, which is the beginning of all texts.
    tokens : its last block's.
    block : where that block's keys and values lie, or None.
    children : the beginnings that are one block longer, by their last block's tokens.
    root : of the tree that it belongs to.
    """

    __slots__ = ("block", "children", "parent", "root", "tokens")

    def __init__(self, parent: Node | None = None, tokens: tuple[int, ...] = ()):
        self.parent, self.tokens = parent, tokens
        self.block: int | None = None
        self.children: dict[tuple[int, ...], Node] = {}
        self.root: Node = self if parent is None else parent.root

    def __repr__(self):
        length, node = 0, self
        while node.parent is not None:
            length, node = length + 1, node.parent
        where = "no block" if self.block is None else f"block {self.block}"
        return f"Node({length} blocks long, {where}, {len(self.children)} children)"


class PrefixIndex:
    """The tree, and the way back from a block to its node.

    Attributes
    ----------
    block_size : tokens of a node.
    root : what all texts begin with: nothing.
    """

    def __init__(self, block_size: int):
        self.block_size = block_size
        self.clear()

    def follow(self, token_ids: SequenceOf[int]) -> list[Node]:
        """The way down the tree that `token_ids` spell, as far as it is known: the root, then a node a whole block."""
        nodes = [self.root]
        for start in range(0, len(token_ids) - self.block_size + 1, self.block_size):
            node = nodes[-1].children.get(tuple(token_ids[start : start + self.block_size]))
            if node is None:
                break
            nodes.append(node)
        return nodes

    def add(self, parent: Node | None, token_ids: SequenceOf[int], block: int) -> Node | None:
        """The node of `token_ids` behind `parent`; they lie in `block`, unless it knows another that holds the same.

        None if `parent` is, or stood in the tree before it was cleared: a beginning must be known from its beginning.
        """
        if parent is None or parent.root is not self.root:
            return None
        parent, tokens = self._regrown(parent), tuple(token_ids)
        node = parent.children.get(tokens)
        if node is None:
            node = parent.children[tokens] = Node(parent, tokens)
        if node.block is None:
            node.block, self._nodes[block] = block, node
        return node

    def evict(self, block: int) -> None:
        """The content of `block` is given up. Its node goes, and those before it that nothing needs any more."""
        node = self._nodes.pop(block)
        node.block = None
        while node.parent is not None and node.block is None and not node.children:
            del node.parent.children[node.tokens]
            node = node.parent

    def clear(self) -> None:
        """Nothing is known any more."""
        self.root = Node()
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
            node = node.children.setdefault(other.tokens, Node(node, other.tokens))
        return node
