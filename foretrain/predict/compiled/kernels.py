"""The kernels of one half of a compiled step, and what is alive between them: Inductor's fusion, estimated. No torch.

Elementwise values are computed where they are read, unless a library's kernel reads them, the graph returns them, or
too much would be read or recomputed (torch/_inductor/graph.py, run_node; config.realize_*). Stored values are fused
with their inputs or with kernels that share these, where no library's kernel is between (torch/_inductor/scheduler.py).
A result takes the place of an input of its size that nobody reads later.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from foretrain.predict.abstract.passage import OUTSIDE, Recorder
from foretrain.predict.abstract.tensors import Storage
from foretrain.predict.compiled.graph import (
    EXTERN,
    INPUT,
    ITEM,
    POINTWISE,
    RANDOM,
    REDUCTION,
    TANGENT,
    VIEW,
    Compiler,
    Node,
)

# Of a sum over so few columns Inductor tries several configs (triton_heuristics.py, persistent_reduction: of one over
# 256 and more, rounded up to a power of two, it takes the first).
FEW_COLUMNS = 128
READS_TWICE = 4  # with more reads and several users it is stored
READS = 8  # with more reads it is stored
OPERATIONS = 30  # with more it is stored: loads, constants and operations (ops_handler.py, OpCounterCSE)
FAR = 64  # kernels that lie farther apart are not fused (scheduler.py, are_long_distant_nodes)


class Kernel:
    __slots__ = ("extern", "first", "members", "own", "reads", "writes")

    def __init__(self, members: list[Node], reads: set[Node], *, extern: bool) -> None:
        self.members, self.reads, self.extern = members, reads, extern
        self.own = set(members)
        self.first = members[0]
        self.writes: list[Node] = []

    @property
    def work(self) -> int:
        return max([_elements(node) for node in self.members])

    @property
    def key(self) -> Any:
        """Return what identifies it: equal kernels are timed once."""
        own = tuple((node.name, node.dtype.name, node.shape) for node in self.members)
        return own, tuple(sorted((int(node.dtype.itemsize), *map(int, node.shape)) for node in self.reads))

    @property
    def ways(self) -> int:
        """Return how many configs Inductor tries (triton_heuristics.py, pointwise and persistent_reduction)."""
        if self.first.name == "index_put":  # one kernel with the sum before it, if any
            return 2 if int(self.first.shape[-1]) <= FEW_COLUMNS else 1
        if self.extern:
            return 1
        sums = [node for node in self.members if node.kind == REDUCTION]
        if not sums:
            return 2
        first = sums[0]
        if _over_rows(first) or not first.inputs or len(first.inputs[0].shape) < 2:
            return 1
        return 2 if int(first.inputs[0].shape[-1]) <= FEW_COLUMNS else 1


class Half:
    """The forward or the backward graph: `nodes` in order, of which `given` are there, and `wanted` are returned."""

    def __init__(
        self, nodes: Sequence[Node], given: Iterable[Node], wanted: Sequence[Node], *, whole: bool = True
    ) -> None:
        self.whole = whole  # whether the loss and the embedding are in one graph
        self.given = {node.base for node in given}
        self.nodes = [node for node in nodes if node not in self.given and node.kind not in (INPUT, TANGENT)]
        self.wanted = {node.base for node in wanted}
        self._users()
        self._realize()
        self._group()
        self.kernels = self._order()
        self.bytes_at: list[int] = []  # what is alive at each, as Inductor estimates it (order.py)

    def _users(self) -> None:
        self.users: dict[Node, list[Node]] = defaultdict(list)
        for node in self.nodes:
            if node.kind == VIEW:
                continue
            for each in dict.fromkeys(each.base for each in node.inputs):
                self.users[each].append(node)

    def _is_extern(self, node: Node) -> bool:
        return self._runs_alone(node) or (node.kind == ITEM and node.inputs[0].kind == EXTERN)

    def _runs_alone(self, node: Node) -> bool:
        return node.kind == EXTERN or node in self.matmuls

    def _adds_to(self, node: Node) -> Node | None:
        """Return the matmul that a returned sum is one kernel with (torch/_inductor/fx_passes/post_grad.py, addmm)."""
        if node.name != "add" or node not in self.wanted or not self.whole:
            return None
        return next((each for each in node.inputs if each.name == "mm" and len(self.users[each]) == 1), None)

    def _realize(self) -> None:
        self.reads: dict[Node, dict[Node, None]] = {}  # in the order in which they are read
        inside: dict[Node, set[Any]] = {}  # what is done to compute one element
        self.matmuls: set[Node] = set()  # sums that are one kernel with a matmul
        self.kept: dict[Node, None] = {}
        for node in self.nodes:
            if node.kind == VIEW:
                continue
            found: dict[Node, None] = {}
            done = {node, *((node.dtype, str(each)) for each in node.constants)}
            for each in node.inputs:
                before = each.base
                # Random numbers are read from memory, too (inductor_prims.random).
                if before in self.kept or before not in self.reads or before.kind == RANDOM:
                    found[before] = None
                    done.add(before)
                else:
                    found |= self.reads[before]
                    done |= inside[before]
            self.reads[node], inside[node] = found, done
            users = self.users[node]
            product = self._adds_to(node)
            if product is not None:  # addmm
                del self.kept[product]
                self.reads[node] = {each: None for each in found if each is not product} | self.reads[product]
                self.matmuls.add(node)
            if (
                node.kind in (EXTERN, REDUCTION, ITEM) or node in self.wanted or len(found) > READS
                or (len(users) > 1 and len(found) > READS_TWICE)
                or (node.kind == POINTWISE and len(done) > OPERATIONS)
                or any(user.kind == EXTERN or self._adds_to(user) for user in users)
            ):  # fmt: skip
                self.kept[node] = None

    def _group(self) -> None:
        depth: dict[Node, int] = {}
        leader: dict[Node, Node] = {}

        def find(node: Node) -> Node:
            while leader[node] is not node:
                node = leader[node]
            return node

        shared: dict[tuple[int, int, Node], Node] = {}
        for node in self.kept:
            before = max([depth.get(each, 0) for each in self.reads[node]], default=0)
            depth[node] = before + self._runs_alone(node)
            leader[node] = node
            if node.kind == ITEM:
                leader[node] = find(node.inputs[0])
                continue
            if self._runs_alone(node):
                continue
            alone = _over_rows(node)
            for each in self.reads[node]:
                if each in leader and not self._is_extern(each) and depth[each] == before and not alone:
                    leader[find(node)] = find(each)
            if alone:
                continue
            work = _elements(node)
            for each in self.reads[node]:
                if each.numel == work and work > 1:
                    other = shared.setdefault((before, work, each), node)
                    leader[find(node)] = find(other)
        members: dict[Node, list[Node]] = defaultdict(list)
        for node in self.kept:
            members[find(node)].append(node)
        self.groups = [self._kernel(each) for each in members.values()]
        self._join_independent()
        readers: dict[Node, list[Node]] = defaultdict(list)
        for node in self.kept:
            for each in self.reads[node]:
                readers[each].append(node)
        for group in self.groups:
            group.writes = [
                node for node in group.members
                if not (node.kind == EXTERN and any(user.kind == ITEM for user in self.users[node]))
                and (node in self.wanted or any(reader not in group.own for reader in readers[node]))
            ]  # fmt: skip

    def _kernel(self, members: list[Node]) -> Kernel:
        members.sort(key=lambda node: node.index)
        reads = set().union(*(self.reads[node] for node in members)) - set(members)
        return Kernel(members, reads, extern=self._runs_alone(members[0]))

    def _join_independent(self) -> None:
        """Fuse kernels that read the same and do not wait for each other; sums over rows only with each other."""
        by_node = {node: i for i, group in enumerate(self.groups) for node in group.members}
        self.position = {node: i for i, node in enumerate(self.kept)}
        readers: dict[tuple[Node, bool], list[int]] = defaultdict(list)
        for i, group in enumerate(self.groups):
            if not group.extern:
                for node in group.reads:
                    if node.numel == group.work > 1:
                        readers[node, _over_rows(group.first)].append(i)
        shared = [numbers for numbers in readers.values() if len(numbers) > 1]
        if not shared:
            return
        waits = self._ancestors(by_node)
        gone: set[int] = set()
        for numbers in sorted(shared):
            a, *others = (i for i in numbers if i not in gone)
            for b in others:
                if b in gone or waits[a] >> b & 1 or waits[b] >> a & 1 or self.groups[a].work != self.groups[b].work:
                    continue
                if self._distance(self.groups[a], self.groups[b]) > FAR:
                    continue
                self.groups[a] = self._kernel(self.groups[a].members + self.groups[b].members)
                gone.add(b)
                both, joined = 1 << a | 1 << b, waits[a] | waits[b]
                waits = [each | joined | both if each & both else each for each in waits]
                waits[a] = waits[b] = joined
        self.groups = [group for i, group in enumerate(self.groups) if i not in gone]

    def _distance(self, one: Kernel, other: Kernel) -> int:
        ends = [[self.position[node] for node in (kernel.members[0], kernel.members[-1])] for kernel in (one, other)]
        return max(ends[0][1] - ends[1][0], ends[1][1] - ends[0][0])

    def _ancestors(self, by_node: dict[Node, int]) -> list[int]:
        found: dict[int, int] = {}
        for kernel in self._order():
            number, mask = by_node[kernel.first], 0
            for node in kernel.reads:
                if node in by_node:
                    mask |= found.get(by_node[node], 0) | 1 << by_node[node]
            found[number] = mask
        return [found[i] for i in range(len(self.groups))]

    def replaced(self, node: Node, ended: Sequence[Node], kernel: Kernel) -> Node | None:
        """Return what a result overwrites: an input of its size for it alone (scheduler.py, decide_inplace_update)."""
        if node.name == "index_put":
            return next((old for old in ended if old.name == "full"), None)
        if kernel.extern:
            return None
        before, open_ = {node}, [node]
        while open_:
            for each in self.reads[open_.pop()]:
                if each in kernel.own and each not in before:
                    before.add(each)
                    open_.append(each)
        for old in self.reads[node]:
            if old.name == "index_put" or (old.nbytes, old.dtype) != (node.nbytes, node.dtype):
                continue
            passing = old in kernel.own and old not in kernel.writes  # in memory only to be overwritten
            if (passing or old in ended) and all(each in before for each in kernel.members if old in self.reads[each]):
                return self.replaced(old, ended, kernel) if passing else old
        return None

    def _order(self) -> list[Kernel]:
        position = {node: i for i, node in enumerate(self.nodes)}
        by_node = {node: group for group in self.groups for node in group.members}
        found: list[Kernel] = []
        state: dict[int, int] = {}
        for start in sorted(self.groups, key=lambda group: position[group.first]):
            open_ = [start]
            while open_:
                group = open_[-1]
                if state.get(id(group)) == 2:
                    open_.pop()
                    continue
                state[id(group)] = 1
                before = {id(by_node[read]): by_node[read] for read in group.reads if read in by_node}
                missing = [each for key, each in before.items() if not state.get(key)]
                if missing:
                    open_ += sorted(missing, key=lambda each: -position[each.first])
                    continue
                state[id(group)] = 2
                found.append(group)
                open_.pop()
        return found


def _over_rows(node: Node) -> bool:
    """Return whether it sums over rows, as a bias's gradient does: in a kernel of its own."""
    if node.kind != REDUCTION or not node.inputs:
        return False
    before = node.inputs[0].shape
    return len(node.shape) > 0 and len(before) > 1 and int(node.shape[0]) != int(before[0])


def _elements(node: Node) -> int:
    return node.inputs[0].numel if node.kind == REDUCTION and node.inputs else node.numel


# What is alive while a graph's kernels run, written into a recorder. torch/_inductor/codegen/wrapper.py, AllocateLine
# and FreeIfNotReusedLine: a result takes the place of an input of its size that nobody reads later, or the memory of
# any tensor of its size that ended before it, which is then never freed in between, unless that would raise the peak
# that Inductor estimates.


@dataclass
class Line:
    """An event while a kernel runs: `made` is allocated, in `old`'s memory if any; `old` ends; `changed` is timed."""

    kernel: Kernel
    made: Node | None = None
    old: Node | None = None
    timed: bool = False
    changed: Sequence[Node] = ()
    dropped: bool = False  # an end that does not happen, since the memory is reused


class Reuse:
    """Memory of ended tensors, by size. `bytes_at`: Inductor's estimate of what is alive at each kernel."""

    def __init__(self, bytes_at: Sequence[int]) -> None:
        self.bytes_at = list(bytes_at)
        self.peak = max(bytes_at, default=0)
        self.ended: dict[Any, list[tuple[int, Line]]] = defaultdict(list)

    def end(self, node: Node, at: int, line: Line) -> None:
        self.ended[node.dtype, node.nbytes].append((at, line))

    def take(self, node: Node, at: int) -> Node | None:
        found = self.ended[node.dtype, node.nbytes]
        if not found:
            return None
        since, line = found[-1]
        between = range(since + 1, at)
        if len(between) and node.nbytes + max(self.bytes_at[i] for i in between) > self.peak:
            return None
        found.pop()
        for i in between:
            self.bytes_at[i] += node.nbytes
        line.dropped = True
        return line.old


class Lives:
    def __init__(self, t: Recorder, machine: Compiler) -> None:
        self.t, self.machine = t, machine
        self.alive: dict[Node, int] = {}  # serial numbers
        self.seen: set[Any] = set()  # kernels that have run
        self.layer: int | None = None  # in the place of the nodes' own, where a graph is that of several layers
        self.given_away: frozenset[Node] = frozenset()  # results of the forward pass that backward reads too

    def allocate(self, node: Node, component: str) -> None:
        shape = node.shape
        if len(shape) == 4 and getattr(shape[1], "letters", ()) == ("H",):  # heads are in rows: H·D is C
            shape = (shape[0], shape[2], shape[1], shape[3])
        self.alive[node] = self.t.allocate(component, node.dtype.itemsize, shape, ours=node.layer != OUTSIDE)

    def free(self, *nodes: Node) -> None:
        for node in nodes:
            self.t.free(self.alive.pop(node))

    def half(self, half: Half, components: dict[Node, str], held: set[Node], *, thread: str) -> None:
        """Run a graph. `components`: of its results; `held`: what lives on after it."""
        last: Kernel | None = None
        for line in self._lines(half, held):
            kernel = line.kernel
            if kernel is not last:
                last = kernel
                self.t.layer = kernel.first.layer if self.layer is None else self.layer
                self.t.moment = _moment(kernel, thread)
                if kernel.first.name == "mm":
                    self._workspace(thread)
            if line.timed:
                changed = tuple(self.alive[node] for node in line.changed)
                self.t.timed.append((len(self.t.events), changed))
            elif line.made is None:
                if not line.dropped and line.old is not None:
                    self.free(line.old)
            else:
                node, old = line.made, line.old
                if old is not None and node not in components:
                    self.alive[node] = self.alive.pop(old)
                    continue
                if old is not None:  # the same memory under another name
                    self.free(old)
                passing = "logits" if node.component == "logits" else "temporaries"
                self.allocate(node, components.get(node, passing))
                if node is kernel.writes[-1]:
                    self._inside(kernel)

    def _lines(self, half: Half, held: set[Node]) -> list[Line]:
        uses: dict[Node, int] = defaultdict(int)
        for kernel in half.kernels:
            for node in kernel.reads:
                uses[node] += 1
        there = set(self.alive)
        reuse = Reuse(half.bytes_at)
        lines: list[Line] = []
        for at, kernel in enumerate(half.kernels):
            first = kernel.first
            self._note_matmul(first)
            dying = []
            for node in sorted(kernel.reads, key=lambda each: each.index):
                uses[node] -= 1
                if not uses[node] and node in there and node not in held:
                    dying.append(node)
            # Tensors from outside, or passed on by the forward pass, are not overwritten ("donated buffers",
            # torch/_functorch/_aot_autograd/graph_compile.py).
            over = [node for node in dying if node.kind != TANGENT and node not in self.given_away]
            changed: list[Node] = []
            for node in kernel.writes:
                old = half.replaced(node, over, kernel)
                if old is not None:
                    over.remove(old)
                    dying.remove(old)
                    changed.append(node)
                elif node.kind != ITEM:  # what a library's kernel returns is its own
                    old = reuse.take(node, at)
                lines.append(Line(kernel, made=node, old=old))
                there.add(node)
            if kernel.ways > 1 and kernel.key not in self.seen:
                self.seen.add(kernel.key)
                lines.append(Line(kernel, timed=True, changed=changed))
            for node in dying:
                there.remove(node)
                lines.append(Line(kernel, old=node))
                if node not in half.given and node.kind != TANGENT:
                    reuse.end(node, at, lines[-1])
        return lines

    def _note_matmul(self, first: Node) -> None:
        if first.name in ("mm", "bmm"):
            *batch, n = first.inputs[1].shape
            *_, m, k = first.inputs[0].shape
            self.t.matmuls.append(((m, k, n, *batch[:-1]), first.inputs[0].dtype.itemsize))

    def _inside(self, kernel: Kernel) -> None:
        letter = {"attention": "split", "attention_backward": "flash"}.get(kernel.first.name)
        if letter and self.t.symbols.get(letter):
            self.t.free(self.t.allocate("workspace", 1, (), (1, letter)))

    def _workspace(self, thread: str) -> None:
        if self.machine.cuda and thread not in self.machine.workspaces:
            serial = self.t.allocate("workspace", 1, (), (1, "cuBLAS"), ours=False)
            self.machine.workspaces[thread] = Storage(self.t, serial)


def _moment(kernel: Kernel, thread: str) -> str:
    last = kernel.members[-1]
    return last.moment if last.moment.startswith(thread) else f"{thread}.{last.moment.partition('.')[2]}"
