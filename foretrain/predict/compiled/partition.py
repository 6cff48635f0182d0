"""The tensors that a compiled forward pass saves: the min-cut nearest to the backward pass (networkx.minimum_cut), by
torch/_functorch/partitioners.py, min_cut_rematerialization_partition: a tensor costs its bytes, more the further it is
from the backward pass; matmuls, attention and small sums are never recomputed."""

import heapq
from collections.abc import Sequence

from foretrain.predict.compiled.graph import FUSIBLE, INPUT, ITEM, PIECE, RECOMPUTABLE, TANGENT, VIEW, Graph, Node

INFINITE = 1 << 62
FAR = 1 << 30
REDUCES_BY = 4  # how much smaller a result is that is kept
LONGEST_CHAIN = 100  # of operations that may be fused
FARTHER = [1.1 ** max(distance, 1) for distance in range(101)]


def _fusible(a: Node, b: Node) -> bool:
    return b.name == "cat" or (a.kind in FUSIBLE and a.name != "cat" and b.kind in FUSIBLE)


class Partition:
    """The two halves of a joint graph. `saved`: what passes between them, in the order of the graph."""

    def __init__(self, graph: Graph, outputs: Sequence[Node], gradients: Sequence[Node]) -> None:
        graph.link()
        self.nodes = _live(graph, [*outputs, *gradients])
        self.outputs, self.gradients = outputs, gradients
        self.forward = _ancestors(outputs)
        self.backward = self._after_tangents()
        self.needed = self.backward | set(gradients)
        self.order = {node: i for i, node in enumerate(n for n in self.nodes if n in self.forward)}
        self._keep_between_checkpoints()
        self._distances()
        self.banned: set[Node] = set()
        self.saved = self._cut()

    def _after_tangents(self) -> set[Node]:
        found: set[Node] = set()
        for node in self.nodes:
            if node.kind == TANGENT or any(each in found for each in node.inputs):
                found.add(node)
        return found

    def _keep_between_checkpoints(self) -> None:
        """Save what one checkpointed function passes to the next (cleanup_recompute_tags)."""
        for node in self.nodes:
            if node.recompute and any(user.recompute and user.region > node.region for user in node.users):
                node.recompute, node.must_save = False, True

    def _distances(self) -> None:
        self.distance: dict[Node, int] = {}
        for node in reversed(self.nodes):
            least = FAR if node in self.forward else 0
            for user in node.users if least else ():
                least = min(least, self.distance.get(user, FAR) + 1)
            self.distance[node] = least

    def _materialized_backwards(self, node: Node) -> bool:
        if _is_view(node):
            return False
        open_ = [node]
        while open_:
            current = open_.pop()
            for user in current.users:
                if user not in self.forward and not _fusible(current, user):
                    return True
                if _is_view(user):
                    open_.append(user)
        return False

    def _never_recomputed(self, node: Node) -> bool:
        if node.kind in (INPUT, ITEM) or node.name == PIECE or node.must_save:
            return node.must_save
        if node.kind not in RECOMPUTABLE or node.name == "cat" or self._materialized_backwards(node):
            return True
        return node.nbytes * REDUCES_BY < sum(each.nbytes for each in node.inputs)

    def _ban(self, node: Node) -> None:
        if not _is_view(node) and not node.recompute:
            self.banned.add(node)

    def _ban_used_far_apart(self) -> None:
        """Ban from recomputation with a node what is fused with it after another that is not."""
        for node in self.order:
            users = [user for user in node.users if user in self.forward]
            if not users:
                continue
            first = self._first_unfusible(users, max(self.order[user] for user in users))
            for user in users:
                if self.order[user] > first and _fusible(node, user) and user not in self.banned:
                    self._ban(user)

    def _first_unfusible(self, start: list[Node], most: int) -> int:
        open_ = [(self.order[node], True) for node in start]
        by_order = self._by_order
        heapq.heapify(open_)
        seen = set(open_)
        while open_:
            at, fusible = heapq.heappop(open_)
            seen.discard((at, fusible))
            if not fusible:
                return at
            node = by_order[at]
            for user in node.users:
                if user in self.forward and self.order[user] <= most:
                    entry = self.order[user], _fusible(node, user)
                    if entry not in seen:
                        heapq.heappush(open_, entry)
                        seen.add(entry)
        return most

    def _ban_long_chains(self) -> None:
        visited: set[Node] = set()
        for start in self.order:
            open_ = [self.order[start]]
            while open_:
                current = self._by_order[heapq.heappop(open_)]
                if current in visited:
                    continue
                visited.add(current)
                if self.order[current] > self.order[start] + LONGEST_CHAIN and not open_:
                    self._ban(current)
                    break
                for user in current.users:
                    if user in self.forward and _fusible(current, user) and user not in self.banned:
                        heapq.heappush(open_, self.order[user])

    def _worth(self, node: Node) -> int:
        if node.kind == INPUT and node.static:
            return 0
        worth = int(node.nbytes * FARTHER[min(self.distance[node], 100)])
        materialized = node.kind == INPUT or not all(_fusible(node, user) for user in node.users)
        return worth if materialized else 2 * worth

    def _cut(self) -> list[Node]:
        self._by_order = list(self.order)
        place = {node: i for i, node in enumerate(node for node in self.nodes if node not in self.backward)}
        source, sink = 2 * len(place), 2 * len(place) + 1
        network = Network(2 * len(place) + 2)
        for node in place:
            if node in self.needed:
                network.join(2 * place[node] + 1, sink, INFINITE)
            if node.recompute:
                network.join(2 * place[node], sink, INFINITE)
            elif node.kind == INPUT or (node in self.forward and self._never_recomputed(node)):
                self._ban(node)
        self._ban_used_far_apart()
        self._ban_long_chains()
        for node, at in place.items():
            if node in self.banned:
                network.join(source, 2 * at, INFINITE)
            network.join(2 * at, 2 * at + 1, self._worth(node) if _one_tensor(node) else INFINITE)
            for user in node.users:
                if user in self.backward:
                    network.join(2 * at + 1, sink, INFINITE)
                elif user in place:
                    network.join(2 * at + 1, 2 * place[user], INFINITE)
        behind = network.behind_cut(source, sink)
        return [node for node, at in place.items() if 2 * at not in behind and 2 * at + 1 in behind]


def _one_tensor(node: Node) -> bool:
    return not any(user.kind == ITEM or user.name == PIECE for user in node.users)


def _is_view(node: Node) -> bool:
    """Return torch's answer, to which a result of split (operator.getitem) is not a view."""
    return node.kind == VIEW and node.name != PIECE


def _live(graph: Graph, wanted: Sequence[Node]) -> list[Node]:
    """Return the nodes that wanted ones need, in order; only these count as users."""
    alive = _ancestors(wanted)
    for node in alive:
        node.users = [user for user in node.users if user in alive]
    return [node for node in graph.nodes if node in alive]


def _ancestors(wanted: Sequence[Node]) -> set[Node]:
    found, open_ = set(wanted), list(wanted)
    while open_:
        for each in open_.pop().inputs:
            if each not in found:
                found.add(each)
                open_.append(each)
    return found


class Network:
    """A flow network. Dinic's algorithm, whose maximal flow gives the same cut as any other's."""

    def __init__(self, count: int) -> None:
        self.edges: list[list[int]] = [[] for _ in range(count)]  # numbers of edges by where they begin
        self.to: list[int] = []
        self.room: list[int] = []

    def join(self, a: int, b: int, room: int) -> None:
        self.edges[a].append(len(self.to))
        self.to.append(b)
        self.room.append(room)
        self.edges[b].append(len(self.to))
        self.to.append(a)
        self.room.append(0)

    def behind_cut(self, source: int, sink: int) -> set[int]:
        """Return what still reaches the sink at maximal flow."""
        while (level := self._levels(source, sink)) is not None:
            self._block(source, sink, level)
        found, open_ = {sink}, [sink]
        while open_:
            at = open_.pop()
            for edge in self.edges[at]:  # its twin leads here
                before = self.to[edge]
                if self.room[edge ^ 1] > 0 and before not in found:
                    found.add(before)
                    open_.append(before)
        return found

    def _levels(self, source: int, sink: int) -> list[int] | None:
        edges, to, room = self.edges, self.to, self.room
        level = [-1] * len(edges)
        level[source] = depth = 0
        row = [source]
        while row:
            following = []
            depth += 1
            for at in row:
                for edge in edges[at]:
                    if room[edge] > 0 and level[to[edge]] < 0:
                        level[to[edge]] = depth
                        following.append(to[edge])
            if level[sink] >= 0:
                return level
            row = following
        return None

    def _block(self, source: int, sink: int, level: list[int]) -> None:
        to, room = self.to, self.room
        tried = [0] * len(self.edges)
        way: list[int] = []
        at, below = source, 1
        while True:
            edges, i = self.edges[at], tried[at]
            count = len(edges)
            while i < count and not (level[to[edges[i]]] == below and room[edges[i]] > 0):
                i += 1
            tried[at] = i
            if i < count:
                way.append(edges[i])
                at = to[edges[i]]
                below += 1
                if at == sink:
                    at = self._fill(way)
                    below = level[at] + 1
            elif at == source:
                return
            else:
                at = to[way.pop() ^ 1]
                tried[at] += 1
                below -= 1

    def _fill(self, way: list[int]) -> int:
        to, room = self.to, self.room
        most = min([room[edge] for edge in way])
        full = -1
        for i, edge in enumerate(way):
            room[edge] -= most
            room[edge ^ 1] += most
            if full < 0 and not room[edge]:
                full = i
        at = to[way[full] ^ 1]
        del way[full:]
        return at
