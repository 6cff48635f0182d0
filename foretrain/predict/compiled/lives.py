"""What is alive while the kernels of a graph run, written into a recorder. No torch.

torch/_inductor/codegen/wrapper.py, AllocateLine and FreeIfNotReusedLine: a result takes the place of an input of its
size that nobody reads later, or the memory of any tensor of its size that ended before it, which is then never freed in
between, unless that would raise the peak that Inductor estimates.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from foretrain.predict.abstract.passage import OUTSIDE, Recorder
from foretrain.predict.abstract.tensors import Storage
from foretrain.predict.compiled.graph import ITEM, TANGENT, Compiler, Node
from foretrain.predict.compiled.kernels import Half, Kernel


@dataclass
class Line:
    """One thing that happens while a kernel runs: `made` comes to life, in the memory of `old` if there is one; or
    `old` ends; or the kernel that changes `changed` is timed."""

    kernel: Kernel
    made: Node | None = None
    old: Node | None = None
    timed: bool = False
    changed: Sequence[Node] = ()
    dropped: bool = False  # an end that does not happen, since the memory is used again


class Reuse:
    """Memory of tensors that have ended, by size. `bytes_at`: Inductor's estimate of what is alive at each kernel."""

    def __init__(self, bytes_at: Sequence[int]) -> None:
        self.bytes_at = list(bytes_at)
        self.peak = max(bytes_at, default=0)
        self.ended: dict[Any, list[tuple[int, Line]]] = defaultdict(list)

    def end(self, node: Node, at: int, line: Line) -> None:
        """A tensor's memory can be used from here on."""
        self.ended[node.dtype, node.nbytes].append((at, line))

    def take(self, node: Node, at: int) -> Node | None:
        """Whose memory a new tensor gets."""
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
    """Runs the kernels of graphs, one after the other."""

    def __init__(self, t: Recorder, machine: Compiler) -> None:
        self.t, self.machine = t, machine
        self.alive: dict[Node, int] = {}  # serial numbers
        self.seen: set[Any] = set()  # kernels that have run
        self.layer: int | None = None  # in the place of the nodes' own, where a graph is that of several layers
        self.given_away: frozenset[Node] = frozenset()  # results of the forward pass that backward reads too

    def birth(self, node: Node, component: str) -> None:
        shape = node.shape
        if len(shape) == 4 and getattr(shape[1], "letters", ()) == ("H",):  # heads lie in rows: H·D is C
            shape = (shape[0], shape[2], shape[1], shape[3])
        self.alive[node] = self.t.birth(component, node.dtype.itemsize, shape, ours=node.layer != OUTSIDE)

    def free(self, *nodes: Node) -> None:
        for node in nodes:
            self.t.death(self.alive.pop(node))

    def half(self, half: Half, components: dict[Node, str], held: set[Node], *, thread: str) -> None:
        """Run a graph. `components`: what its results count as; `held`: what is there after it, whoever reads it."""
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
                self.birth(node, components.get(node, passing))
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
            self._note_product(first)
            dying = []
            for node in sorted(kernel.reads, key=lambda each: each.index):
                uses[node] -= 1
                if not uses[node] and node in there and node not in held:
                    dying.append(node)
            # What comes from outside, or was given away by the forward pass, is not written over ("donated buffers",
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

    def _note_product(self, first: Node) -> None:
        if first.name in ("mm", "bmm"):
            *batch, n = first.inputs[1].shape
            *_, m, k = first.inputs[0].shape
            self.t.products.append(((m, k, n, *batch[:-1]), first.inputs[0].dtype.itemsize))

    def _inside(self, kernel: Kernel) -> None:
        letter = {"attention": "split", "attention_backward": "flash"}.get(kernel.first.name)
        if letter and self.t.symbols.get(letter):
            self.t.death(self.t.birth("workspace", 1, (), (1, letter)))

    def _workspace(self, thread: str) -> None:
        """cuBLAS keeps one for each thread."""
        if self.machine.cuda and thread not in self.machine.workspaces:
            serial = self.t.birth("workspace", 1, (), (1, "cuBLAS"), ours=False)
            self.machine.workspaces[thread] = Storage(self.t, serial)


def _moment(kernel: Kernel, thread: str) -> str:
    last = kernel.members[-1]
    return last.moment if last.moment.startswith(thread) else f"{thread}.{last.moment.partition('.')[2]}"
