"""A tree of all runs of tokens up to a length, with how often each occurred.

A run that occurred once is a leaf that points at its place in a text; what follows there is read from the text, and the
leaf gets children only when another run comes along. So a text of N tokens without repetition makes N nodes, whatever
the depth, and one that is still growing needs no work for what is unique so far.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence

Text = MutableSequence[int]
_NOTHING: Text = []


class Node:
    """A run of tokens.

    Args:
        count: occurrences. last: number of the latest one. children: by next token; None while there is one occurrence.
            text, at: of the first occurrence, and the index of the token behind it.
    """

    __slots__ = ("at", "children", "count", "last", "text")

    def __init__(self, last: int, text: Text, at: int) -> None:
        self.count = 1
        self.last = last
        self.children: dict[int, Node] | None = None
        self.text = text
        self.at = at


Match = tuple[Node, int]
"""A run that a text ends with, and its length."""


class SuffixTree:
    """Occurrences of runs of up to ``depth`` tokens."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._clock = 0
        self.runs: dict[int, Node] = {}
        """Runs of one token."""

    def append(self, text: Text, at: int, matches: Sequence[Match] = ()) -> list[Match]:
        """Count the runs that end with token ``at`` of ``text``, and return those that occurred before, longest first.

        Args:
            matches: what the call for the token before returned.
        """
        token, end = text[at], at + 1
        self._clock += 1
        found: list[Match] = []
        for node, length in (*matches, (None, 0)):
            children = self.runs if node is None else node.children
            assert children is not None, "a match has occurred twice"
            start = self._clock - length
            child = children.get(token)
            if child is None:
                children[token] = Node(start, text, end)
                continue
            self._enter(child, length + 1, start)
            if length + 1 < self._depth:
                found.append((child, length + 1))
        return found

    def add(self, text: Text) -> None:
        """Count all runs of a text."""
        matches: list[Match] = []
        for at in range(len(text)):
            matches = self.append(text, at, matches)
        self._clock += self._depth

    def remove(self, text: Sequence[int]) -> None:
        """Forget the runs of a text that was added."""
        for start in range(len(text)):
            children: dict[int, Node] | None = self.runs
            for token in text[start : start + self._depth]:
                assert children is not None, "the text was added"
                child = children[token]
                child.count -= 1
                if child.count == 0:
                    del children[token]
                    break
                children = child.children

    def matches(self, text: Sequence[int], end: int) -> list[Match]:
        """Return the runs before ``end`` of another text that occurred here, longest first."""
        found = []
        for length in range(min(self._depth - 1, end), 0, -1):
            node = self._find(text, end - length, end)
            if node is not None:
                found.append((node, length))
        return found

    def _find(self, text: Sequence[int], start: int, end: int) -> Node | None:
        children: dict[int, Node] | None = self.runs
        node: Node | None = None
        for at in range(start, end):
            if children is None:
                assert node is not None
                rest = end - at
                return _further(node, rest) if _says(node, text, at, end) else None
            node = children.get(text[at])
            if node is None:
                return None
            children = node.children
        return node

    def _enter(self, child: Node, length: int, start: int) -> None:
        """Count another occurrence; the first one gets a child of its own."""
        if child.children is None and length < self._depth:
            child.children = {}
            if child.at < len(child.text):
                child.children[child.text[child.at]] = Node(child.last, child.text, child.at + 1)
        child.count += 1
        child.last = start
        child.text = _NOTHING  # texts that were removed are not kept alive

    def follow(
        self, node: Node, length: int, limit: int, floor: float, own: Sequence[int] | None = None
    ) -> tuple[list[int], float]:
        """Return the likeliest tokens behind a run, each the most frequent behind those before it (the latest of equal
        ones), and the sum of their paths' probabilities: how many of them are expected to be right.

        Args:
            length: of the run. limit: most tokens. floor: least probability of a path. own: the text that is to be
                continued, where it is part of the tree: behind its end it goes on with what was just found (a loop).
        """
        tokens: list[int] = []
        share, score = 1.0, 0.0
        children, text, at = node.children, node.text, node.at
        while len(tokens) < limit and length + len(tokens) < self._depth:
            if children is None:
                token = _read(text, at, own, tokens)
                if token is None:
                    break
                at += 1
            elif children:
                token, best = max(children.items(), key=_rank)
                share *= best.count / sum(child.count for child in children.values())
                children, text, at = best.children, best.text, best.at
            else:
                break
            if share < floor:
                break
            tokens.append(token)
            score += share
        return tokens, score


def _rank(item: tuple[int, Node]) -> tuple[int, int]:
    return item[1].count, item[1].last


def _read(text: Text, at: int, own: Sequence[int] | None, tokens: list[int]) -> int | None:
    if at < len(text):
        return text[at]
    if text is own and at - len(text) < len(tokens):
        return tokens[at - len(text)]
    return None


def _says(leaf: Node, text: Sequence[int], at: int, end: int) -> bool:
    """Return whether a leaf's text goes on with tokens ``at`` to ``end`` of another."""
    return list(leaf.text[leaf.at : leaf.at + end - at]) == list(text[at:end])


def _further(leaf: Node, count: int) -> Node:
    """Return the run that is ``count`` tokens longer than a leaf; not a part of the tree."""
    return Node(leaf.last, leaf.text, leaf.at + count)
