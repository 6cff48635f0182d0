"""A trained model in the files that others read. `foretrain.export` for Python."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from foretrain.app.train import need_torch
from foretrain.base.errors import UserError, need_extra
from foretrain.base.installation import Later, installed
from foretrain.base.records import Record
from foretrain.base.units import (
    JOULES_PER_KWH,
    format_duration,
    format_energy,
    format_mass,
    format_money,
    format_percent,
)
from foretrain.comparison.loss_axes import meter_of
from foretrain.config.options import OPTIONS, RunConfig
from foretrain.config.presets import GPT2_SHAPES
from foretrain.config.resolve import toml_value
from foretrain.config.shape import ModelShape
from foretrain.predict.speed.time import Range
from foretrain.predict.timing import Prices, spending
from foretrain.runs.record import Scores, TrainedRun
from foretrain.training.exports.forms import Exported, Form, FormOptions, GgufType

if TYPE_CHECKING:
    from foretrain.training.checkpoint import Progress


_ON_THE_HUB = re.compile(r"hf://datasets/([\w.-]{1,96}/[\w.-]{1,96})(?:[@/].*)?")


class Figure(Record):
    """A line of a card: what it is, its value as a text, and how that was found."""

    name: str
    value: str
    how: str


class Loss(Record):
    """Mean losses in nats per token, after so many steps."""

    step: int
    train: float
    val: float

    @property
    def perplexity(self) -> float:
        return math.exp(self.val) if self.val < 700 else math.inf


class CardFacts(Record):
    """A run, as a card tells it. Texts are as the run has them: names are not ours."""

    name: str
    model_type: str
    dataset: str
    hub_datasets: tuple[str, ...]
    base_model: str
    hardware: str
    loss: Loss | None
    figures: tuple[Figure, ...]
    co2_g: float | None
    co2_how: str
    config: str
    has_tokenizer: bool
    evaluated: bool = False


def facts_of(
    record: TrainedRun,
    progress: Progress,
    lines: Sequence[dict[str, Any]],
    tokenizer: bool,
    scores: Scores | None = None,
) -> CardFacts:
    """Return the card's facts of the checkpoint that `progress` tells of; later lines of `lines` count for nothing."""
    config = record.config
    shape = ModelShape.of(config)
    loss = _loss(lines, progress.step)
    on_card = record.gpu.kind == "cuda"
    hardware = f"{record.devices} x {record.gpu.name}" if on_card else record.gpu.name
    spent, co2_g, co2_how = _spent(record, progress, lines)
    figures = [
        Figure(name="Parameters", value=f"{shape.n_params:,}", how="counted, a tied embedding once"),
        Figure(
            name="Shape", how="the run's config",
            value=f"{config.n_layer} layers, {config.n_head} heads, width {config.n_embd:,}, "
            f"context {config.block_size:,}, vocabulary {config.vocab_size:,}",
        ),
        *_data(record, progress),
        *_loss_figures(config, loss),
        *(_score_figures(record, scores) if scores else []),
        Figure(name="Hardware", value=hardware, how="as the driver names it" if on_card else "as the system names it"),
        Figure(
            name="Precision", how="the run's record",
            value=record.dtype + (", compiled by torch.compile" if record.compiled else ""),
        ),
        Figure(name="Time", value=format_duration(progress.elapsed_s), how="wall clock up to this checkpoint"),
        *_speed(record),
        *spent,
    ]  # fmt: skip
    remotes = [record.dataset.remote, *(part.dataset.remote for part in record.dataset.parts)]
    matches = [_ON_THE_HUB.fullmatch(remote) for remote in remotes if remote]
    return CardFacts(
        name=record.name, model_type=shape.family.write_config(config, None)["model_type"],
        dataset=record.dataset.name, hardware=hardware, loss=loss, figures=tuple(figures), co2_g=co2_g,
        hub_datasets=tuple(dict.fromkeys(match[1] for match in matches if match)),
        base_model=f"openai-community/{config.init_from}" if config.init_from in GPT2_SHAPES else "",
        co2_how=co2_how, config=_learning(config), has_tokenizer=tokenizer,
        evaluated=bool(scores and (scores.texts or scores.tasks)),
    )  # fmt: skip


def _data(record: TrainedRun, progress: Progress) -> list[Figure]:
    data, config = record.dataset, record.config
    seen = progress.step * config.tokens_per_step
    tokenizer = f", tokenizer {data.tokenizer}" if data.tokenizer else ""
    return [
        Figure(
            name="Data", value=f"{data.name}: {data.train_tokens:,} training tokens, {data.val_tokens:,} for validation"
            f"{tokenizer}", how="the dataset's files",
        ),
        Figure(
            name="Tokens seen", how=f"{progress.step:,} steps of {config.tokens_per_step:,} tokens",
            value=f"{seen:,} ({seen / max(1, data.train_tokens):.3g} epochs)",
        ),
    ]  # fmt: skip


def _loss(lines: Sequence[dict[str, Any]], step: int) -> Loss | None:
    evaluations = [line for line in lines if line["kind"] == "evaluation" and line["step"] <= step]
    last = max(evaluations, key=lambda line: line["step"], default=None)
    return Loss(step=last["step"], train=last["train_loss"], val=last["val_loss"]) if last else None


def _loss_figures(config: RunConfig, loss: Loss | None) -> list[Figure]:
    if loss is None:
        return [Figure(name="Validation loss", value="not measured", how="the run was not evaluated")]
    batch = f"{config.batch_size:,} x {config.block_size:,}"
    how = f"mean of {config.eval_iters:,} batches of {batch} after {loss.step:,} steps"
    val = f"{loss.val:.4f} nats per token (perplexity {loss.perplexity:.4g})"
    return [
        Figure(name="Validation loss", value=val, how=how),
        Figure(name="Training loss", value=f"{loss.train:.4f} nats per token", how=how),
    ]


def _score_figures(record: TrainedRun, scores: Scores) -> list[Figure]:
    figures = []
    for text in scores.texts:
        own = text.text == f"{record.dataset.name}/val"
        of = "the validation data" if own else PurePath(text.text).name
        part = "" if text.whole else f", its first {text.tokens:,} tokens"
        figures.append(
            Figure(
                name="Bits per byte", value=f"{_with_error(text.bits_per_byte, text.standard_error)} of {of}{part}",
                how=f"foretrain eval: windows of {text.context_tokens:,} tokens, one every {text.stride_tokens:,}, "
                f"{text.dtype}",
            )
        )  # fmt: skip
    for task in scores.tasks:
        shots = "" if task.shots is None else f", {task.shots}-shot"
        asked, of = task.documents, task.documents_in_all
        part = "" if asked == of else f", {asked} of {of} documents"
        value = f"{task.task}, {task.metric}: {_with_error(task.value, task.standard_error)}"
        figures.append(Figure(name="Task", value=value, how=f"{task.harness}{shots}{part}, {task.dtype}"))
    return figures


def _with_error(value: float, error: float | None) -> str:
    return f"{value:.4f}" if error is None else f"{value:.4f} ± {error:.4f}"


def _speed(record: TrainedRun) -> list[Figure]:
    if record.tokens_per_s is None:
        return []
    mfu = f", {format_percent(record.mfu)} MFU" if record.mfu is not None else ""
    return [Figure(name="Speed", value=f"{record.tokens_per_s:,.0f} tokens/s{mfu}", how="mean of the run's steps")]


def _spent(
    record: TrainedRun, progress: Progress, lines: Sequence[dict[str, Any]]
) -> tuple[list[Figure], float | None, str]:
    """Return (energy, CO2 and cost up to the checkpoint; grams of CO2 and how they were found)."""
    config, elapsed_s = record.config, progress.elapsed_s
    meter = meter_of(lines) if record.devices == 1 else None  # readings are of the first rank's card
    guessed = spending(
        Prices.of(config), record.gpu, record.mfu, Range(low_s=elapsed_s, expected_s=elapsed_s, high_s=elapsed_s),
        record.devices,
    )  # fmt: skip
    if meter is not None:
        joules, low, high = meter.until_j(elapsed_s), None, None
        how = "measured: the card's power readings over time (NVML); the rest of the machine is not in it"
    else:
        joules, low, high = guessed.energy_expected_j, guessed.energy_low_j, guessed.energy_high_j
        drawn = "what a busy core draws" if record.gpu.kind == "cpu" else "the card's board power and the run's MFU"
        how = f"estimated from {drawn}, over time; the rest of the machine is not in it"
    figures, co2_g, co2_how = [], None, ""
    if joules is not None:
        span = f" ({format_energy(low)} to {format_energy(high)})" if low is not None and high is not None else ""
        figures.append(Figure(name="Energy", value=f"{format_energy(joules)}{span}", how=how))
    if joules is not None and config.co2_per_kwh:
        co2_g = joules / JOULES_PER_KWH * config.co2_per_kwh
        source = "measured" if meter else "estimated"
        co2_how = f"{source} energy times {config.co2_per_kwh:g} g/kWh, as the run's config says"
        figures.append(Figure(name="CO2", value=format_mass(co2_g), how=co2_how))
    if config.price_per_hour:
        rent = record.devices * elapsed_s / 3600 * config.price_per_hour
        per = f"hours times {config.price_per_hour:g} {config.currency} an hour of a card, as the run's config says"
        figures.append(Figure(name="Cost", value=f"{format_money(rent)} {config.currency}", how=per))
    elif joules is not None:
        cost = joules / JOULES_PER_KWH * config.price_per_kwh
        per = f"energy times {config.price_per_kwh:g} {config.currency}/kWh, as the run's config says"
        figures.append(Figure(name="Cost", value=f"{format_money(cost)} {config.currency} of electricity", how=per))
    return figures, co2_g, co2_how


def _learning(config: RunConfig) -> str:
    """Return the options that decide what is learned, as TOML; no paths of the machine."""
    kept = [name for name, each in OPTIONS.items() if each.group != "run" and "learning" in each.affects]
    published = config.init_from in ("scratch", *GPT2_SHAPES)
    return "\n".join(
        f"{name} = {toml_value(getattr(config, name))}"
        for name in kept
        if name != "dataset" and (name != "init_from" or published)
    )


_LONGEST = 100  # characters of a name
# Signs that Markdown or HTML may read as more than themselves, and those that make an address a link.
_ACTIVE = re.compile(r"[^\w\s.,:;'%=/()+-]|(?<![^\W_])_|_(?![^\W_])|(?<=www)\.|:(?=/)|^[+-]")


def card_of(facts: CardFacts) -> str:
    hub = need_extra("huggingface_hub", "export")
    text = f"---\n{_metadata(hub, facts)}\n---\n\n{_body(facts)}"
    return str(hub.ModelCard(text))  # which reads the metadata back


def plain(text: str) -> str:
    """Return a user's name as Markdown shows it letter by letter, so that none is read as YAML, Markdown or HTML."""
    return _ACTIVE.sub(lambda found: f"&#{ord(found[0])};", _one_line(text)) or "&#45;"


def _metadata(hub: Any, facts: CardFacts) -> str:
    name = _one_line(facts.name) or "model"
    results = []
    if facts.loss is not None:
        data = _one_line(facts.dataset) or "data"
        task = {"task_type": "text-generation", "dataset_name": data, "dataset_type": _slug(data)}
        for metric, value, shown in (
            ("loss", facts.loss.val, "Validation loss, nats per token"),
            ("perplexity", facts.loss.perplexity, "Validation perplexity"),
        ):
            if math.isfinite(value):
                metric_fields = {"metric_type": metric, "metric_value": float(f"{value:.6g}"), "metric_name": shown}
                results.append(hub.EvalResult(**task, **metric_fields, dataset_split="validation"))
    more: dict[str, Any] = {}
    if facts.co2_g is not None:
        more["co2_eq_emissions"] = {
            "emissions": float(f"{facts.co2_g:.4g}"),  # grams, as the Hub has it
            "source": facts.co2_how,
            "training_type": "fine-tuning" if facts.base_model else "pre-training",
            "hardware_used": _one_line(facts.hardware),
        }
    data = hub.ModelCardData(
        library_name="transformers", pipeline_tag="text-generation", tags=["foretrain", facts.model_type],
        base_model=facts.base_model or None, datasets=list(facts.hub_datasets) or None,
        model_name=name if results else None, eval_results=results or None, **more,
    )  # fmt: skip
    return data.to_yaml()


def _body(facts: CardFacts) -> str:
    rows = [f"| {each.name} | {plain_figure(each.value)} | {plain_figure(each.how)} |" for each in facts.figures]
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", facts.config)), default=0))
    use = _USE if facts.has_tokenizer else _USE_IDS
    return "\n".join([
        f"# {plain(facts.name)}",
        "",
        f"A {facts.model_type} language model, trained with foretrain. It continues text; it was not tuned to follow",
        "instructions or to be safe.",
        "",
        "| figure | value | how it was found |",
        "| --- | --- | --- |",
        *rows,
        "",
        f"The validation split is the run's own.{'' if facts.evaluated else ' No other evaluation was made.'}",
        "What licence the data allow for the weights is not known here: add one, and say what the data hold.",
        "",
        "## Use",
        "",
        use,
        "",
        "## Config",
        "",
        f"{fence}toml",
        facts.config,
        fence,
        "",
    ])  # fmt: skip


def plain_figure(text: str) -> str:
    return " ".join(plain(text[at : at + _LONGEST]) for at in range(0, len(text), _LONGEST)) if text else ""


def _one_line(text: str) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in text[:_LONGEST]).split())


def _slug(text: str) -> str:
    return re.sub(r"[^\w.-]+", "-", text, flags=re.ASCII).strip("-.") or "data"


_USE = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # this folder, or owner/name on the Hub
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
ids = tokenizer("The", return_tensors="pt").input_ids
print(tokenizer.decode(model.generate(ids, max_new_tokens=50)[0]))
```"""
_USE_IDS = """The tokenizer is not in this folder: the model takes and gives token ids.

```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(".")  # this folder, or owner/name on the Hub
```"""


_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)


def check_repository(name: str) -> None:
    if not _REPOSITORY.fullmatch(name):
        raise UserError("usage.push_name", name=name[:100])


def upload(name: str, folder: Path, files: Sequence[str], message: str) -> str:
    """Upload these files in one commit, if need be to a new private repository; return its URL. Raises UserError."""
    hub = need_extra("huggingface_hub", "export")
    kept = shlex.quote(str(folder))
    if not hub.get_token():
        raise UserError("environment.push_no_token", name=name, path=kept)
    api = hub.HfApi()
    try:
        address = api.create_repo(name, private=True, exist_ok=True)
        operations = [hub.CommitOperationAdd(path_in_repo=each, path_or_fileobj=folder / each) for each in files]
        api.create_commit(name, operations, commit_message=message)
    except Exception as error:  # of the network, of rights, of names: the library has a class for each
        raise UserError("environment.push_failed", name=name, path=kept, reason=_reason(error)) from None
    return str(address)


def _reason(error: BaseException) -> str:
    """Return the last line that says something: the library puts its request's number first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line for line in lines if "Request ID" not in line] or lines or [type(error).__name__]
    return json.dumps(causes[-1][:200], ensure_ascii=False)[1:-1].rstrip(".")


SCHEMA = "foretrain.model/1#export"
_of_run: Any = Later("foretrain.app.evaluation")  # which imports torch


def export(
    run: str | Path,
    to: Form = "hf",
    out: str | Path | None = None,
    *,
    best: bool = False,
    force: bool = False,
    gguf_type: GgufType | None = None,
    push: str | None = None,
) -> Exported:
    """What was written, and from which checkpoint: `foretrain.export("out", "hf").path`.

    `run`: a run, or one of its checkpoints. `to`: "hf" for transformers, with the tokenizer and a model card; "gguf"
    for llama.cpp; "onnx" for ONNX Runtime; "nanogpt" for a ckpt.pt that nanoGPT resumes; "safetensors" for the weights
    under nanoGPT's names.
    `out`: a folder, by default in the run. `best`: the checkpoint of lowest validation loss instead of the newest.
    `force`: into a folder that is not empty. `gguf_type`: how GGUF stores matrices, f16 by default. `push`:
    owner/name on the Hub to upload the "hf" folder to. Raises UserError: nothing to export, or a folder that is taken
    2, no torch, no upload or no right to write 4, damaged files 7, disk full 8.
    """
    if gguf_type is not None and to != "gguf":
        raise UserError("usage.gguf_type_alone", form=to)
    if push is not None:
        if to != "hf":
            raise UserError("usage.push_form", form=to)
        check_repository(push)
    need_torch()
    from foretrain.training.exports.source import export as write_export

    card = _card if installed("huggingface-hub") else None
    made = write_export(
        Path(run), to, None if out is None else Path(out), best=best, force=force,
        options=FormOptions(gguf_type=gguf_type or "f16", card=card),
    )  # fmt: skip
    if to == "hf" and card is None:
        made = made.model_copy(update={"notes": (*made.notes, "no_card")})
    if push is None:
        return made
    address = upload(push, Path(made.path), made.files, f"{made.checkpoint} of a foretrain run")
    return made.model_copy(update={"pushed": address})


def _card(source: Any) -> str:
    lines, weights = source.run.read_lines("metrics"), _of_run.weights_sha256(source.path)
    scores = next((each for each in source.run.scores() if each.weights_sha256 == weights), None)
    return card_of(facts_of(source.record, source.progress, lines, "no_tokenizer" not in source.notes, scores))
