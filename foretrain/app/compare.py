"""Runs, plans, logs and tables side by side; one run: its forecast against it. `foretrain.compare` for Python."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from foretrain.analysis.forecast_check import ForecastCheck, of_directory
from foretrain.app.limits import Limits, priced, prices_of
from foretrain.base.errors import UserError
from foretrain.comparison.compare import Comparison
from foretrain.comparison.compare import compare as compare_subjects
from foretrain.comparison.sources import subjects_of
from foretrain.comparison.subject import Subject
from foretrain.config.options import RunConfig
from foretrain.config.resolve import ResolvedConfig
from foretrain.hardware import devices
from foretrain.hardware.catalogue import stated_bytes
from foretrain.runs.folder import RunDirectory
from foretrain.runs.record import source_of

Tell = Callable[[tuple[UserError, ...]], None]  # hears what was skipped in a config


def compare(
    *sources: str | Path,
    gpu: str = "auto",
    used_by_others: str | int = 0,
    price: str | None = None,
    columns: Mapping[str, str] | None = None,
    tell: Tell = lambda notes: None,
) -> Comparison | ForecastCheck:
    """What differs between these sources, which is better beyond noise, and whether one setting explains it: a
    Comparison; of a single run directory a ForecastCheck, its forecast against what it measured.

    Each source is a run directory, a plan (JSON), a config or preset, a log, or a run of wandb, TensorBoard,
    trackio, or an export of theirs, as `foretrain compare` takes them: "fast=my.toml+batch_size=8".
    `gpu`, `used_by_others` (bytes, or a text such as "2GB"): the card of logs, exports and configs. `price`: rent per
    hour, such as "0.35/h". `columns`: {role: name of a column} of exports. Times are in seconds, memory is in bytes.
    Raises UserError for what cannot be read.
    """
    if len(sources) == 1 and Path(sources[0]).is_dir():
        if source_of(Path(sources[0])) == "trainer":
            raise UserError("usage.compare_trainer", path=str(sources[0]))
        return of_directory(RunDirectory(Path(sources[0])))[2]
    return compared(
        [str(source) for source in sources], gpu=gpu, used_by_others=used_by_others, price=price, columns=columns,
        tell=tell,
    ).comparison  # fmt: skip


@dataclass(frozen=True)
class Compared:
    subjects: list[Subject]
    comparison: Comparison


def compared(
    sources: Sequence[str], *, gpu: str = "auto", used_by_others: str | int = 0, price: str | None = None,
    columns: Mapping[str, str] | None = None, tell: Tell = lambda notes: None, option: str = "used_by_others",
) -> Compared:  # fmt: skip
    stated = used_by_others
    if isinstance(stated, str):
        stated = stated_bytes(stated, option) if stated else 0
    found = subjects_of(sources, tell, gpu=devices.find_device(gpu), used_by_others_bytes=stated, columns=columns)
    subjects = _with_rents(found, price)
    return Compared(subjects, compare_subjects(subjects))


def _with_rents(subjects: list[Subject], price: str | None) -> list[Subject]:
    if price is None:
        return subjects
    cards = {subject.gpu.name: subject.gpu for subject in subjects if subject.gpu is not None}
    limits = Limits(price=price)
    base = priced(ResolvedConfig(RunConfig(), {}), limits).config
    rents = dict(zip(cards, prices_of(limits, base, list(cards.values())), strict=True))
    return [replace(s, rent_per_hour=rents[s.gpu.name]) if s.gpu and rents[s.gpu.name] else s for s in subjects]
