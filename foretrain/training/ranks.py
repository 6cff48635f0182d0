"""One rank's view of a run: how ranks meet, agree, hear of an ended one, and part.

They agree through torch.distributed's TCPStore, as JSON: each sends a word, the first decides, all hear it. Every wait
has an end: `collective_timeout`, or the end of another rank.

A rank that ends with an error leaves its last word in the store, where a thread of each rank looks once per second.
"""

import json
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from foretrain.base import bugs
from foretrain.base.errors import UserError
from foretrain.base.installation import installed
from foretrain.base.signals import StopFlag
from foretrain.config.options import RunConfig
from foretrain.config.sharing import Sharing, config_of_rank
from foretrain.data.batches import Batch, starts
from foretrain.model.peers import ALONE as ALONE_PEERS
from foretrain.model.peers import Peers
from foretrain.model.step import TrainState
from foretrain.runs.folder import RunDirectory, now
from foretrain.runs.record import RankFigures, RunRecord
from foretrain.training.attempts import Mean, Sum
from foretrain.training.device import Placement, identity_of, place
from foretrain.training.place import ALONE, OfRank, Place, host_name, slow

if TYPE_CHECKING:
    from foretrain.model.parallel import Share

LAST = "last"  # the key of the first last word
LOOKS_EVERY_S = 1.0
GRACE_S = 8.0  # to come out of a collective, once another rank has ended
# torch's messages about a failed collective or store, where the error's type does not tell.
_BROKEN = (
    "Connection closed by peer", "Connection reset", "Timed out waiting", "NCCL", "gloo", "Broken pipe",
    "Connection refused", "Socket",
)  # fmt: skip


class Ranks:
    def __init__(self, place: Place = ALONE) -> None:
        self.place = place
        self.peers = ALONE_PEERS
        self.ends: Callable[[UserError], object] = lambda error: None

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def world(self) -> int:
        return self.place.world

    @property
    def first(self) -> bool:
        return self.place.first

    def agree(self, word: Any, decide: Callable[[list[Any]], Any], *, patient: bool = False) -> Any:
        """Return the first rank's decision about the words of all, as JSON; `patient`: wait until another rank ends."""
        return decide([word])

    def sums(self, numbers: Sequence[float], device: torch.device) -> list[float]:
        return list(numbers)

    def explained(self, error: BaseException) -> BaseException:
        return error

    def tell(self, error: UserError) -> None:
        """Send the others the reason why this rank ends, once."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


class Group(Ranks):
    """One of several ranks. A context manager: at its end they part, each with its error. `timeout_s`: how long they
    wait. `ends`: called on the first rank where a collective hangs; it must end the process."""

    def __init__(self, place: Place, timeout_s: float) -> None:
        super().__init__(place)
        self.timeout_s = timeout_s
        self._count = 0
        self._parting = threading.Event()
        self._store: Any = PrefixStore(f"foretrain/{place.attempt}", meet(place, timeout_s))
        own = self._store.clone()  # another connection, as a waiting one is taken
        self._watch = threading.Thread(target=self._look, args=(own,), name="foretrain-ranks", daemon=True)
        self._watch.start()

    def start(self, device: torch.device) -> None:
        cards = device.type == "cuda"
        dist.init_process_group(
            "nccl" if cards else "gloo", store=PrefixStore("group", self._store), rank=self.rank,
            world_size=self.world, timeout=timedelta(seconds=self.timeout_s), device_id=device if cards else None,
        )  # fmt: skip
        self.peers = Peers.joined()

    def agree(self, word: Any, decide: Callable[[list[Any]], Any], *, patient: bool = False) -> Any:
        self._count += 1
        own = f"word/{self._count}"
        self._set(f"{own}/{self.rank}", word)
        if not self.first:
            return json.loads(self._get([own], patient)[0])
        keys = [f"{own}/{rank}" for rank in range(self.world)]
        verdict = decide([json.loads(text) for text in self._get(keys, patient)])
        self._set(own, verdict)
        for key in (*keys, f"word/{self._count - 1}"):  # all have heard it, since they spoke again
            self._store.delete_key(key)
        return verdict

    def _set(self, key: str, word: Any) -> None:
        try:
            self._store.set(key, json.dumps(word))
        except RuntimeError as error:
            raise self._broken(error) from None

    def _get(self, keys: list[str], patient: bool) -> list[bytes]:
        end = time.monotonic() + self.timeout_s
        while True:
            try:
                self._store.wait(keys, timedelta(seconds=LOOKS_EVERY_S))
                return self._store.multi_get(keys)
            except dist.DistStoreError:
                self._raise_last()
            except RuntimeError as error:
                raise self._broken(error) from None
            if not patient and time.monotonic() > end:
                raise self._late(keys)

    def _late(self, keys: list[str]) -> UserError:
        missing = [key for key in keys if not self._store.check([key])] if self.first else []
        ranks = [int(key.rpartition("/")[2]) for key in missing] or [0]
        return UserError(
            "environment.rank_late", ranks=ranks[:8], count=len(ranks), world=self.world, seconds=self.timeout_s
        )

    def sums(self, numbers: Sequence[float], device: torch.device) -> list[float]:
        tensor = torch.tensor(list(numbers), dtype=torch.float64, device=device)
        dist.all_reduce(tensor)
        return tensor.tolist()

    def explained(self, error: BaseException) -> BaseException:
        broken = isinstance(error, RuntimeError) and (
            isinstance(error, dist.DistError) or any(text in str(error) for text in _BROKEN)
        )
        return self._broken(error) if broken else error

    def _broken(self, error: BaseException) -> UserError:
        """Explain a failed collective or store: mostly another rank has ended with a word, which may take a moment."""
        try:
            for _ in range(10):
                self._raise_last()
                time.sleep(LOOKS_EVERY_S / 10)
            gone = self._silent()
            self._raise_last()
        except OfRank as other:
            return other
        except RuntimeError:  # the store is gone, and with it the first rank
            gone = [0]
        if gone:
            return UserError("environment.ranks_lost", ranks=gone, count=len(gone), world=self.world)
        message = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        return UserError("environment.collective_failed", message=message[:200], seconds=self.timeout_s)

    def _raise_last(self) -> None:
        if self._store.check([LAST]):
            word = json.loads(self._store.get(LAST))
            if word["rank"] != self.rank:
                raise OfRank(word)

    def _silent(self) -> list[int]:
        others = [rank for rank in range(self.world) if rank != self.rank]
        before = [self._store.add(f"beat/{rank}", 0) for rank in others]
        time.sleep(2.5 * LOOKS_EVERY_S)
        return [r for r, was in zip(others, before, strict=True) if self._store.add(f"beat/{r}", 0) == was][:8]

    def _last_word(self, error: UserError) -> None:
        """Leave this rank's last word; only the first of all counts."""
        if isinstance(error, OfRank) or error.id.startswith("environment.ranks_lost"):
            return
        self._store.compare_set(LAST, "", json.dumps(self._word(error), default=str))

    def _word(self, error: UserError) -> dict[str, Any]:
        return {"rank": self.rank, "host": host_name(), "id": error.id, "values": error.values, "said": str(error)}

    def _look(self, store: Store) -> None:
        """Count in a thread, look for a last word, and after one wait a while, then end the process."""
        error: UserError | None = None
        while error is None:
            if self._parting.wait(LOOKS_EVERY_S):
                return
            try:
                store.add(f"beat/{self.rank}", 1)
                word = json.loads(store.get(LAST)) if store.check([LAST]) else None
            except RuntimeError:
                error = UserError("environment.ranks_lost", ranks=[0], count=1, world=self.world)
            else:
                error = OfRank(word) if word is not None and word["rank"] != self.rank else None
        if not self._parting.wait(GRACE_S):
            if self.first:
                self.ends(error)
            os._exit(int(error.exit_code))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.agree(None, lambda words: None, patient=True)  # the first one may have to save
                self._parting.set()
                if dist.is_initialized():
                    dist.destroy_process_group()
                self._leave()
            elif isinstance(error, Exception):
                found = self.explained(error)
                reported = found if isinstance(found, UserError) else bugs.unexpected_error(found)
                self.tell(reported)
                if not self.first and not isinstance(reported, OfRank):
                    reported = OfRank(self._word(reported))
                if reported is not error:
                    raise reported from None
        finally:
            self._parting.set()

    def tell(self, error: UserError) -> None:
        try:
            self._last_word(error)
            if self.first and not self.place.agent:  # the store ends with this process: let the others read it
                time.sleep(2 * LOOKS_EVERY_S)
        except RuntimeError:
            pass

    def _leave(self) -> None:
        try:
            if self.first:
                self._get([f"left/{rank}" for rank in range(1, self.world)], patient=False)
            else:
                self._store.set(f"left/{self.rank}", "")
        except (RuntimeError, UserError):
            pass


def meet(place: Place, timeout_s: float) -> Store:
    """Open the store where the ranks of a run meet. Raises UserError where that fails."""
    serves = place.first and not place.agent
    found: queue.Queue[Store | Exception] = queue.Queue()

    def connect() -> None:
        limit = timedelta(seconds=timeout_s)
        try:
            found.put(TCPStore(place.address, place.port, place.world, serves, limit, wait_for_workers=False))
        except (RuntimeError, ValueError) as error:
            found.put(error)

    # In a thread, as it waits for ever for the answer of another program that listens there.
    threading.Thread(target=connect, name="foretrain-meeting", daemon=True).start()
    try:
        store = found.get(timeout=timeout_s + 1)
    except queue.Empty:
        store = TimeoutError()
    if not isinstance(store, Exception):
        return store
    if serves and any(text in str(store) for text in ("EADDRINUSE", "address already in use")):
        raise UserError("environment.port_in_use", address=place.address, port=place.port)
    raise UserError("environment.no_meeting", meeting=place.meeting, seconds=timeout_s)


def greet(ranks: Ranks, word: dict[str, Any]) -> dict[str, Any]:
    """Exchange what the ranks are. Raises UserError where texts under `same` or cards do not fit together."""
    return cast("dict[str, Any]", ranks.agree(word, _fitting))


def _fitting(words: list[dict[str, Any]]) -> dict[str, Any]:
    for what, first in words[0]["same"].items():
        for rank, word in enumerate(words):
            if (other := word["same"].get(what)) != first:
                raise UserError(
                    "environment.ranks_unlike", what=what, first=first, rank=rank, host=word["host"], other=other
                )
    seen: dict[str, int] = {}
    for rank, word in enumerate(words):
        if word["uuid"] and seen.setdefault(word["uuid"], rank) != rank:
            raise UserError(
                "environment.ranks_one_card", first=seen[word["uuid"]], rank=rank, host=word["host"], card=word["card"]
            )
    return {"hosts": [word["host"] for word in words], "cards": [word["card"] for word in words]}


def placed(config: RunConfig, ranks: Group) -> Placement:
    """Decide where this rank runs, check that all fit together, and make their group. Raises UserError."""
    placement = place(_on_own_card(config, ranks.place))
    if placement.device.type == "cuda":
        torch.cuda.set_device(placement.device)
    same = {"torch": torch.__version__, "foretrain": installed("foretrain"), "device": placement.device.type}
    same |= {key: str(value) for key, value in config.model_dump().items()}
    uuid = identity_of(placement.device).get("uuid", "")
    greet(ranks, {"host": host_name(), "card": placement.gpu.name, "uuid": uuid, "same": same})
    ranks.start(placement.device)
    return placement


def _on_own_card(config: RunConfig, place: Place) -> RunConfig:
    """Return the config for the card with this rank's number; Slurm may show each task only its own card, as 0."""
    if config.device not in ("auto", "cuda"):
        if config.device != "cpu":
            raise UserError("usage.ranks_one_device", device=config.device, world=place.world)
        return config
    if not torch.cuda.is_available():
        return config.model_copy(update={"device": "cpu"})
    cards, index = torch.cuda.device_count(), place.local_rank
    if index >= cards:
        if cards > 1 or not os.environ.get("CUDA_VISIBLE_DEVICES"):
            raise UserError("environment.more_ranks_than_cards", ranks=place.local_world, cards=cards, host=host_name())
        index = 0
    return config.model_copy(update={"device": f"cuda:{index}"})


# Each step's loss is reduced over the ranks, and with it whether one of them has a message (Parallel.mean). Only then
# do they confer, all after the same step, so an uneventful run has no further collective.

SLOW_TWICE = 2  # evaluations in a row, before it is reported


class Together:
    """The ranks at work. `smaller`: a micro-batch that only this rank uses, until all do."""

    def __init__(self, ranks: Ranks, flag: StopFlag, note: Callable[..., None]) -> None:
        self.ranks, self.flag, self.note = ranks, flag, note
        self.smaller: int | None = None
        self.by_number = ranks.world > 1  # whether dropout's seed is the number of a micro-batch
        self.figures: tuple[RankFigures, ...] = ()
        self._evaluated_s, self._evaluated_tokens = 0.0, 0
        self._slow: dict[int, int] = {}  # evaluations in which a rank was slow, in a row

    @property
    def several(self) -> bool:
        return self.ranks.world > 1

    def part_of(self, config: RunConfig) -> RunConfig:
        return config_of_rank(config, self.ranks.world) if self.several else config

    def share(self, config: RunConfig) -> "Share | None":
        if not self.several:
            return None
        # FSDP and its imports take half a second and 50 MB, which a run of one rank does not need.
        from foretrain.model.parallel import Share

        return Share(Sharing.of(config, self.ranks.place.world, self.ranks.place.local_world))

    def begin(self, state: TrainState) -> None:
        if state.parallel:
            state.parallel.asks = lambda: bool(self.flag.asked) or self.smaller is not None

    def confer(self, batch_size: int) -> int:
        """Return the common micro-batch; where one was asked to stop, all are. Every rank calls this."""
        word = {"stop": self.flag.asked, "batch_size": self.smaller or batch_size}
        verdict = self.ranks.agree(word, _agreed)
        self.smaller = None
        if verdict["stop"]:
            self.flag.agree(verdict["stop"])
        return int(verdict["batch_size"])

    def dealt(self, batches: Iterable[Batch], config: RunConfig, step: int) -> Iterable[Batch]:
        """Yield this rank's part of a step's micro-batches. Their numbers in the whole step seed dropout."""
        if config.dropout and self.by_number:
            batches = seeded(batches, config.seed, step, self.ranks.rank, self.ranks.world)
        return self._pieces(batches, self.smaller) if self.smaller else batches

    def _pieces(self, batches: Iterable[Batch], rows: int) -> Iterator[Batch]:
        for idx, targets in batches:
            yield from zip(idx.split(rows), targets.split(rows), strict=True)

    def part(self, state: TrainState) -> tuple[int, int]:
        """Return (which, of how many) of an evaluation's batches this rank does: all, where each needs every rank."""
        shards = state.parallel is not None and state.parallel.sharing.way.shards_weights
        return (0, 1) if shards else (self.ranks.rank, self.ranks.world)

    def mean(self, own: Sum, device: torch.device) -> Mean:
        if isinstance(own, tuple):
            total, weight = own
            if not self.several:
                return total / weight
        elif not self.several:
            return own
        else:
            total, weight = 0.0, 0.0
        words = (total, weight, float(own is None), float(own == "out of memory"))
        total, weight, stopped, failed = self.ranks.sums(words, device)
        if failed:
            return "out of memory"
        return None if stopped else total / weight

    def evaluated(self, seconds: float, tokens: int) -> None:
        self._evaluated_s, self._evaluated_tokens = self._evaluated_s + seconds, self._evaluated_tokens + tokens

    def gather(self, figures: RankFigures) -> None:
        """Send all figures to the first rank, and report who is slow. After an evaluation, by every rank."""
        update: dict[str, Any] = {"evaluated_s": self._evaluated_s, "evaluated_tokens": self._evaluated_tokens}
        update["host"] = host_name()
        self._evaluated_s, self._evaluated_tokens = 0.0, 0

        def keep(words: list[Any]) -> None:
            self.figures = tuple(RankFigures.model_validate(each) for each in words)
            for figures, behind in slow(self.figures):
                values = {"rank": figures.rank, "host": figures.host, "card": figures.card, "behind": behind}
                self._slow[figures.rank] = self._slow.get(figures.rank, 0) + 1
                if self._slow[figures.rank] == SLOW_TWICE:  # once may be chance, and the first one compiles
                    self.note("slow_rank", **values)

        self.ranks.agree(figures.model_copy(update=update).to_json(), keep)


def _agreed(words: list[dict[str, Any]]) -> dict[str, Any]:
    stop = next((word["stop"] for word in words if word["stop"]), "")
    return {"stop": stop, "batch_size": min(word["batch_size"] for word in words)}


# Events of this rank and no other. The first one reports all others.
_OWN = ("out_of_memory", "micro_batch_shrunk", "not_compiled", "memory_exceeded", "throttled", "suspended")


class FollowerDirectory(RunDirectory):
    """The directory of a run whose lock another rank has. `rank-N.jsonl` is this rank's own."""

    def __init__(self, path: Path, rank: int) -> None:
        super().__init__(path)
        self.own = f"rank-{rank}"

    @property
    def scratch(self) -> Path:
        """Return its own, since the first one sweeps the run's."""
        folder = self.path / ".ranks" / self.own
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def acquire(self) -> None:
        pass

    def release(self) -> None:
        self._teller.end()

    def write(self, name: str, text: str) -> None:
        pass

    def restore_removed(self) -> tuple[str, ...]:
        return ()

    def write_record(self, record: RunRecord) -> None:
        pass

    def append(self, name: str, record: dict[str, Any]) -> None:
        pass

    def event(self, id: str, /, **values: Any) -> None:
        if id in _OWN:
            super().append(self.own, {"at": now(), "id": id, "values": values})

    def drop_metrics_from(self, step: int, *, keep_evaluation: bool, whole: bool = True) -> None:
        pass


_STREAM = 0x44524F50  # 'DROP': other numbers than in data/batches.py
_SEEDS = 1 << 62


def seed_of(seed: int, step: int, micro_batch: int) -> int:
    return int(starts(seed, _STREAM, step, micro_batch + 1, _SEEDS)[-1])


def seeded(batches: Iterable[Batch], seed: int, step: int, rank: int = 0, world: int = 1) -> Iterator[Batch]:
    """Seed this process's generators before each micro-batch by its number in the whole step, for dropout's masks."""
    for number, batch in enumerate(batches):
        torch.manual_seed(seed_of(seed, step, rank + number * world))
        yield batch
