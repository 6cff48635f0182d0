"""What one look at this machine shows: its processor, its cards, and the runs that are in the folders or alive here."""

from typing import Literal

from foretrain.base.records import Record
from foretrain.training.folder.label import UNSAID, Label

SCHEMA = "foretrain.top/1"
Kind = Literal["run", "watched", "trainer"]
RunPhase = Literal["starting", "compiling", "training", "evaluating", "saving", "running", "ended", "unreadable"]
# here: a process of this machine does it; elsewhere: of another one, or of another container; nowhere: it has ended.
Where = Literal["here", "elsewhere", "nowhere"]


class LiveRun(Record):
    """One run at one moment; None where nothing says it.

    `status`: the record's. `memory_bytes`: of a run on a card what PyTorch has reserved there, on a CPU what its
    processes hold; `planned_bytes`: the highest that the plan expects of the same, at most `planned_high_bytes`.
    `cards`: NVML's numbers of those on which its processes hold memory. `problem`: why a run cannot be read.
    """

    path: str
    kind: Kind
    name: str
    label: Label = UNSAID
    where: Where
    host: str = ""
    phase: RunPhase
    phase_s: float | None = None
    status: str = ""
    device: str = ""
    started_at: str = ""
    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    val_loss: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    memory_bytes: int | None = None
    memory_peak_bytes: int | None = None
    planned_bytes: int | None = None
    planned_high_bytes: int | None = None
    eta_s: float | None = None
    elapsed_s: float | None = None
    energy_j: float | None = None
    energy_source: Literal["measured", "estimated"] | None = None
    pids: tuple[int, ...] = ()
    cards: tuple[int, ...] = ()
    problem: str = ""


class LiveCard(Record):
    """One card at one moment; None where NVML does not say.

    `runs_bytes`: what the runs here hold; `others_bytes`: the rest that is in use, by the programs in `others` as far
    as they have a name here; both None where NVML does not tell processes apart. `busy`: the share of the last moments
    in which a kernel ran. `energy_j`: the driver's counter since it was loaded; `energy_seen_j`: since the first look.
    """

    index: int
    name: str
    driver: str = ""
    total_bytes: int | None = None
    used_bytes: int | None = None
    runs_bytes: int | None = None
    others_bytes: int | None = None
    others: tuple[str, ...] = ()
    busy: float | None = None
    clock_ghz: float | None = None
    reasons: tuple[str, ...] = ()
    temperature_c: int | None = None
    power_w: float | None = None
    energy_j: float | None = None
    energy_seen_j: float | None = None


class LiveMachine(Record):
    """The processor and the memory of this machine. `load`: processes that wait for it, a mean of one minute."""

    host: str
    cpu: str
    cores: int
    busy: float | None = None
    load: float | None = None
    total_bytes: int
    used_bytes: int | None = None
    runs_bytes: int | None = None


class Top(Record):
    """Everything at one moment. `runs`: those that are alive first, each kind the newest first; `more_runs`: how many
    older ones there are. `no_cards`: why NVML shows no card."""

    at: str
    machine: LiveMachine
    cards: tuple[LiveCard, ...] = ()
    no_cards: str = ""
    runs: tuple[LiveRun, ...] = ()
    more_runs: int = 0
