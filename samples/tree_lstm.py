"""Tree-LSTMs (Tai et al. 2015) for any tree: one plan, in which a loop visits the nodes, children before parents.

    nimblec compile samples.tree_lstm:child_sum -o tree.plan --target cpu
    nimblec compile samples.tree_lstm:child_sum_by_levels -o tree.plan --target cuda

A tree is an array: row i holds the children of node i, which come before it, and -1 in the places of missing ones.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

Tree = Sequence["Tree"]
"""A node is the list of its children."""

WORDS, WIDTH, MOST_NODES = 300, 150, 128


def post_order(tree: Tree, arity: int, most_nodes: int = MOST_NODES) -> Tensor:
    """Return the children of each node (most_nodes x arity), -1 for none; the root is the last node of the tree.

    Raises ValueError for a tree of more nodes, or with a node of more children.
    """
    rows: list[list[int]] = []

    def add(node: Tree) -> int:
        children = [add(child) for child in node]
        if len(children) > arity:
            raise ValueError(f"a node has {len(children)} children, expected at most {arity}")
        rows.append(children + [-1] * (arity - len(children)))
        return len(rows) - 1

    add(tree)
    if len(rows) > most_nodes:
        raise ValueError(f"the tree has {len(rows)} nodes, expected at most {most_nodes}")
    return torch.tensor(rows + [[-1] * arity] * (most_nodes - len(rows)))


class ChildSum(nn.Module):
    """A node from the sum of its children's states, with a forget gate for each child (equations 2 to 8)."""

    def __init__(self, words: int = WORDS, width: int = WIDTH) -> None:
        super().__init__()
        self.width = width
        self.of_word = nn.Linear(words, 4 * width)
        self.of_children = nn.Linear(width, 3 * width, bias=False)
        self.of_child = nn.Linear(width, width, bias=False)

    def forward(self, word: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """Words (n x words) and states of children (n x arity x width, 0 for none) to n states of nodes (n x width)."""
        return self.nodes(self.of_word(word), h, c)

    def nodes(self, read: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """As `forward`, with what `of_word` made of the words."""
        gates, forget = read.split((3 * self.width, self.width), -1)
        i, o, u = (gates + self.of_children(h.sum(1))).chunk(3, -1)
        forgets = torch.sigmoid(forget.unsqueeze(1) + self.of_child(h))
        c = torch.sigmoid(i) * torch.tanh(u) + (forgets * c).sum(1)
        return torch.sigmoid(o) * torch.tanh(c), c


class Binary(nn.Module):
    """A node from its left and its right child, each with weights of its own (equations 9 to 14)."""

    def __init__(self, words: int = WORDS, width: int = WIDTH) -> None:
        super().__init__()
        self.width = width
        self.of_word = nn.Linear(words, 5 * width)
        self.of_children = nn.Linear(2 * width, 5 * width, bias=False)

    def forward(self, word: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """Words (n x words) and states of children (n x 2 x width, 0 for none) to n states of nodes (n x width)."""
        return self.nodes(self.of_word(word), h, c)

    def nodes(self, read: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """As `forward`, with what `of_word` made of the words."""
        gates = read + self.of_children(h.flatten(1))
        i, o, u, left, right = gates.chunk(5, -1)
        c = torch.sigmoid(i) * torch.tanh(u) + (torch.sigmoid(torch.stack((left, right), 1)) * c).sum(1)
        return torch.sigmoid(o) * torch.tanh(c), c


class TreeLSTM(nn.Module):
    """The state of the root of a tree, from one node in each trip."""

    def __init__(self, cell: ChildSum | Binary, arity: int = 2, most_nodes: int = MOST_NODES) -> None:
        super().__init__()
        self.cell, self.arity, self.most_nodes = cell, arity, most_nodes

    def forward(self, words: Tensor, children: Tensor, count: Tensor) -> Tensor:
        """Words (most_nodes x words), children (most_nodes x arity) and the number of nodes to 1 x width."""

        def goes_on(node: Tensor, *_state: Tensor) -> Tensor:
            return node < count

        def visit(node: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            at = node.reshape(1)
            below = torch.index_select(children, 0, at).squeeze(0) + 1  # row 0 is that of a missing child
            state = torch.index_select(h, 0, below).unsqueeze(0), torch.index_select(c, 0, below).unsqueeze(0)
            new_h, new_c = self.cell.nodes(torch.index_select(read, 0, at), *state)
            return node + 1, torch.index_copy(h, 0, at + 1, new_h), torch.index_copy(c, 0, at + 1, new_c)

        read = self.cell.of_word(words)  # of all words in one product
        zeros = [words.new_zeros(self.most_nodes + 1, self.cell.width) for _ in range(2)]
        node, h, _ = torch.while_loop(goes_on, visit, (count.new_zeros(()), *zeros))
        return torch.index_select(h, 0, node.reshape(1))


class LevelTreeLSTM(TreeLSTM):
    """The same from as many trips as the tree has levels, each of which computes all nodes: for GPUs."""

    def forward(self, words: Tensor, children: Tensor, count: Tensor) -> Tensor:
        """As `TreeLSTM`; nodes have any order, but the root is node count - 1. A circle of nodes gives zeros."""

        def goes_on(level: Tensor, known: Tensor, *_state: Tensor) -> Tensor:
            return (level < self.most_nodes) & torch.index_select(known, 0, root).squeeze(0).logical_not()

        def visit(level: Tensor, known: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            below_h, below_c = (torch.index_select(x, 0, below).unflatten(0, (-1, self.arity)) for x in (h, c))
            new_h, new_c = self.cell.nodes(read, below_h, below_c)
            now = torch.index_select(known, 0, below).unflatten(0, (-1, self.arity)).all(1)
            new = (now & ~known)[:, None]
            return level + 1, now, torch.where(new, new_h, h), torch.where(new, new_c, c)

        pad = nn.functional.pad
        read = pad(self.cell.of_word(words), (0, 0, 1, 0))
        below = pad(children + 1, (0, 0, 1, 0)).flatten()  # row 0 is that of a missing child, known as zeros
        root, rows = count.reshape(1), torch.arange(self.most_nodes + 1, device=words.device)
        zeros = [words.new_zeros(len(rows), self.cell.width) for _ in range(2)]
        _, _, h, _ = torch.while_loop(goes_on, visit, (count.new_zeros(()), rows == 0, *zeros))
        return torch.index_select(h, 0, root)


Example = tuple[nn.Module, tuple[Tensor, Tensor, Tensor]]


def child_sum() -> Example:
    """A child-sum Tree-LSTM over trees of at most `MOST_NODES` nodes, with an example."""
    return _example(ChildSum)


def binary() -> Example:
    """A binary Tree-LSTM, with an example."""
    return _example(Binary)


def child_sum_by_levels() -> Example:
    """As `child_sum`, by levels."""
    return _example(ChildSum, LevelTreeLSTM)


def binary_by_levels() -> Example:
    """As `binary`, by levels."""
    return _example(Binary, LevelTreeLSTM)


def _example(cell: type[ChildSum | Binary], network: type[TreeLSTM] = TreeLSTM) -> Example:
    torch.manual_seed(0)
    leaf: Tree = []
    tree = [[leaf, leaf], [leaf, [leaf, leaf]]]
    return network(cell()).eval(), (torch.randn(MOST_NODES, WORDS), post_order(tree, 2), torch.tensor(9))
