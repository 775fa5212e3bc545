"""Which pages a tier holds, and which one goes next. Pure.

Pages form a forest that follows the key chains. Only a leaf may go, and of the leaves the least recently used one:
children go before their parents, however often either was used.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvrelay.kv.tiers.tier import PageKeys


@dataclass(slots=True, eq=False)
class Node:
    """A page held; `used` counts up with every use of any page."""

    page: PageKeys
    parent: "Node | None"
    used: int
    children: "dict[bytes, Node]" = field(default_factory=dict)


class PageIndex:
    """A forest of pages with their order of use. Every operation on a page is O(1), dropping a subtree its size."""

    def __init__(self) -> None:
        self._nodes: dict[bytes, Node] = {}
        self._leaves: OrderedDict[bytes, None] = OrderedDict()  # least recently used first
        self._uses = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, name: bytes) -> bool:
        return name in self._nodes

    def __iter__(self) -> Iterator[PageKeys]:
        """Yield every page, parents before their children: none is added before its parent."""
        return (node.page for node in self._nodes.values())

    def takes(self, page: PageKeys) -> bool:
        """Tell whether the page before it is held, or none is needed."""
        return page.parent is None or page.parent in self._nodes

    def add(self, page: PageKeys) -> None:
        """Add a page that is not held, as the most recently used one."""
        assert page.name not in self._nodes
        parent = None if page.parent is None else self._nodes[page.parent]
        node = Node(page, parent, self._tick())
        self._nodes[page.name] = node
        self._leaves[page.name] = None
        if parent is not None:
            self._leaves.pop(parent.page.name, None)
            parent.children[page.name] = node

    def touch(self, name: bytes) -> None:
        """Note a use; an unknown page is ignored."""
        node = self._nodes.get(name)
        if node is None:
            return
        node.used = self._tick()
        if name in self._leaves:
            self._leaves.move_to_end(name)

    def next_to_go(self) -> PageKeys | None:
        """Return the least recently used leaf."""
        name = next(iter(self._leaves), None)
        return None if name is None else self._nodes[name].page

    def drop(self, name: bytes) -> tuple[PageKeys, ...]:
        """Drop a page and all that follow it; return them, children before their parents."""
        if name not in self._nodes:
            return ()
        gone: list[PageKeys] = []
        stack = [self._nodes[name]]
        while stack:
            if stack[-1].children:
                stack.extend(stack[-1].children.values())
            else:
                gone.append(self._drop_leaf(stack.pop()))
        return tuple(gone)

    def check_integrity(self) -> None:
        """Prove that the forest is closed and that the leaves are those without children."""
        for name, node in self._nodes.items():
            assert node.page.name == name
            assert (name in self._leaves) == (not node.children)
            if node.parent is None:
                assert node.page.parent is None
                continue
            assert self._nodes[node.parent.page.name] is node.parent
            assert node.page.parent == node.parent.page.name
            assert node.parent.children[name] is node
        assert len(self._leaves) <= len(self._nodes)

    def _drop_leaf(self, node: Node) -> PageKeys:
        del self._nodes[node.page.name]
        del self._leaves[node.page.name]
        parent = node.parent
        if parent is not None:
            del parent.children[node.page.name]
            if not parent.children:
                self._leaves[parent.page.name] = None
                # Unless it was used since, it is no better than the child that went.
                self._leaves.move_to_end(parent.page.name, last=parent.used > node.used)
        return node.page

    def _tick(self) -> int:
        self._uses += 1
        return self._uses
