"""`foretrain plan`: what a run will take, before it is started."""

from pathlib import Path
from typing import Any

import click

from foretrain.app.limits import Limits
from foretrain.app.ranks.job_files import JOB_KINDS
from foretrain.app.ranks.job_files import write_job as write_job_of
from foretrain.base.errors import UserError
from foretrain.base.messages import option_help, option_unit
from foretrain.cli.command import OF_CONFIG, command, flag, json_option, option, quiet_option, words_argument
from foretrain.cli.common import OUT, need_one_of, print_json
from foretrain.cli.planning import exact as plan_exact
from foretrain.cli.planning import options, reading
from foretrain.cli.planning import printing as plan_print
from foretrain.cli.planning.exact import Depth
from foretrain.cli.planning.printing import Form, tell_written
from foretrain.predict.largest import Largest
from foretrain.predict.trace import interpreter
from foretrain.reports import text
from foretrain.reports.document import Document, Message, Section, Table


def show_config_of(request: Any, limits: Limits, as_json: bool) -> None:
    """Print the options of what is asked, as a table or as one JSON object."""
    values, options, sources = request.settings(limits)
    sources = {name: sources.get(name, "default") for name in options}
    if as_json:
        print_json({"schema": "foretrain.config/1", "config": values.model_dump(mode="json"), "sources": sources})
        return
    rows = tuple(
        (
            each.name,
            str(getattr(values, each.name)),
            option_unit(each.unit),
            sources[each.name],
            option_help(each.name, each.help, each.texts),
        )
        for each in options.values()
    )
    columns = tuple(Message(f"column.{name}") for name in ("key", "value", "unit", "source", "help"))
    section = Section(Message("config.knobs"), (Table(columns, rows),))
    text.render(Document(Message("config.title", {"name": request.name}), Message("config.subtitle"), [section]), OUT)


EPILOG = """Examples:

foretrain plan gpt2-124m --gpu "RTX 4070" --used-by-others 2GB

foretrain plan config/train_gpt2.py --gpu 4070 --batch_size=8 --compile=false

foretrain plan my.toml --gpu 3060,4070,4090 --json

foretrain plan my.toml --gpu 4070 --step-time 3.9   (hours and MFU from your log)

foretrain plan config/train_gpt2.py --gpu 4070 --exact   (traces the real step, without a GPU)

foretrain plan my.py --gpu 4070 --explain --observed 6582MiB --process 4464MiB   (why is it so much?)

foretrain plan my.py --gpu 4070 --used-by-others 2GB --largest batch_size

foretrain plan my.py --gpu 3060,4070 --batch_size=auto --total_batch_size=524288   (the micro-batch that fits)

foretrain plan my.py --gpu 4070,4090,A100-SXM4-80GB --price "4090=0.35,A100-SXM4-80GB=1.2"   (which card?)

foretrain plan my.py --gpus "2 x RTX 4090"   (DDP, ZeRO-1 and FSDP2 side by side: does a second card pay?)

foretrain plan my.py --gpus "2 nodes x 8 x H100 SXM5" --strategy=hsdp --full

foretrain plan my.py --gpu 4070 --within 12h --write shorter.toml   (also 5EUR, 3kWh; --tokens 10B)

foretrain plan --gpu 4070 --best --within 20h --data-tokens 3.68B   (which model?)

foretrain plan llama-3.2-1b --method lora --seq-len 4096 --batch-size 2 --gpu 4070   (fine-tuning)

foretrain plan hf:Qwen/Qwen3-8B --method qlora --gradient-checkpointing --gpu 4090

foretrain plan axolotl.yaml --gpu 3090   (also LLaMA-Factory, TRL, torchtune, unsloth, TrainingArguments)

foretrain plan qwen3-8b --method qlora --batch-size 1 --gpu 3090,4090 --within 5EUR --data-tokens 10M

foretrain plan llama-3.1-8b --inference --weights q4_k_m --context 16k --gpu 4070   (generating text)

foretrain plan hf:Qwen/Qwen3-8B --inference --weights int8 --batch 8 --gpu A100-SXM4-80GB

Fine-tuning takes --method, --lora-r, --seq-len, --optim, --packing, --epochs and more: see docs/fine-tuning.md.

Generating text takes --context, --batch, --weights, --kv, --prompt, --engine, --split: see docs/inference.md."""


@command("plan", EPILOG, **OF_CONFIG)
@words_argument
@options.gpu
@options.gpus
@options.link
@options.network
@options.others
@option("--step-time", "Seconds per iteration from your log, for hours, MFU and energy.", type=float)
@option("--logged-mfu", "The mfu that nanoGPT printed, in percent, for the step time.", type=float)
@flag("--check", "Exit with code 3 if the step of the verdict does not fit, may not fit or does not run there.")
@flag(
    "--inference",
    "Plan generating text instead of training: memory with the KV cache, tokens per second. Takes "
    "--context, --batch, --weights, --kv, --prompt, --engine, --split.",
)
@option(
    "--trainer NAME",
    "Which step the answers are about: foretrain or nanogpt. Default: nanogpt for nanoGPT's own files, else foretrain.",
    default="",
)
@flag("--exact", "Trace the real step for this card. Takes seconds; needs torch, but no GPU.")
@flag("--explain", "Show where the memory goes: each component, each tensor at the peak, and nvidia-smi's figures.")
@option("--observed", "With --explain: memory in use on the card by nvidia-smi, such as 6582MiB.", default="")
@option("--process", "With --explain: memory of the process by nvidia-smi, such as 4464MiB.", default="")
@option(
    "--largest OPTION",
    "Find the largest batch_size, block_size or n_layer that fits (fine-tuning: batch_size, seq_len or "
    "lora_r): estimated, with --exact traced.",
    default="",
)
@flag("--smallest-card", "Find the smallest card on which the run fits.")
@option("--snapshot FILE", "Write the trace as a memory snapshot for pytorch.org/memory_viz.", type=Path)
@option(
    "--alloc-conf TEXT",
    "Allocator settings for traces, such as expandable_segments:True. Default: PYTORCH_ALLOC_CONF.",
    default="",
)
@option(
    "--python PATH",
    "Trace with the torch of another environment, the one that will train: its Python, or its folder. "
    "torch 2.6 or newer; compiled 2.11 or newer.",
    default="",
)
@flag("--show-config", "Print every option of the config, its value and its source, instead of a plan.")
@options.price
@option(
    "--co2",
    "Grams of CO2 per kWh of your electricity; see ourworldindata.org/grapher/carbon-intensity-electricity.",
    type=float,
)
@option("--within LIMIT", "How many steps fit in 12h, 90m, 1d12h, in 3kWh, or in 5EUR?")
@option("--tokens COUNT", "How many steps fit in 10B tokens?")
@flag("--best", "With --within: find the GPT with the lowest estimated loss that fits the card and the limit.")
@option("--data-tokens COUNT", "Tokens in your training data, such as 3.68B or 10M; longer runs repeat data.")
@option("--write FILE.toml", "Write the config that --within, --tokens or --best finds.", type=Path)
@option(
    "--write-job KIND",
    "With --gpus: write a job file with what the plan found, for Slurm or SkyPilot: slurm or sky.",
    default="",
)
@flag("--full", "Print everything: phases, every byte with its formula, FLOPs, energy, notes.")
@flag("--oneline", "Print one line, to paste into a forum or a chat.")
@json_option
@quiet_option
@click.pass_context
def plan_command(
    context: click.Context,
    words: list[str],
    gpu: str,
    gpus: str,
    link: str,
    network: str,
    others: str,
    step_time: float | None,
    logged_mfu: float | None,
    check: bool,
    inference: bool,
    trainer: str,
    exact: bool,
    explain: bool,
    observed: str,
    process: str,
    largest: str,
    smallest_card: bool,
    snapshot: Path | None,
    alloc_conf: str,
    python: str,
    show_config: bool,
    price: str | None,
    co2: float | None,
    within: str | None,
    tokens: str | None,
    best: bool,
    data_tokens: str | None,
    write: Path | None,
    write_job: str,
    full: bool,
    oneline: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Plan a run: does it fit, how long, what does it cost, what limits it. Needs no GPU and no torch."""
    request = reading.read(context, words)
    given = context.params
    limits = Limits(price, co2, within, tokens, best, data_tokens, write, request.given)
    if show_config:
        show_config_of(request, limits, as_json)
        return
    depth = Depth(**{name: given[name] for name in Depth.__dataclass_fields__})
    form = Form(full, oneline, as_json, reading.asked_of(context, request, words))
    form.check(elsewhere="--explain" if explain else "--largest" if largest and not limits.asks else "")
    plan_exact.check_depth(depth, request.files)
    request.check(limits, look=depth.looks, traced=depth.traces, largest=largest)
    if write_job:
        need_one_of("--write-job", write_job, tuple(JOB_KINDS))
    with interpreter.use_interpreter(python):
        plans = request.plans(limits, step_time, logged_mfu)
        _check_count(plans, depth, limits, alone=bool(write_job) or (bool(largest) and as_json))
        answered, found = _answered(request, plans, limits, depth, form)
    if write_job:
        tell_written(write_job_of(write_job, plans[0], words), quiet=quiet)
    if check and found is not None and found.value is None:
        plan_print.exit_with(UserError("check.largest_nothing", option=largest, name=request.name, gpu=plans[0].place))
    if check and not best:
        plan_print.check(answered)


def _check_count(plans: list[Any], depth: Depth, limits: Limits, *, alone: bool) -> None:
    """Raise UserError for what can only be asked of one card, and for readings that no card can show. `alone`: one card
    is needed in any case."""
    plan_exact.check_readings(depth, [plan.gpu for plan in plans])
    one = depth.looks or depth.smallest_card or alone or (depth.largest and limits.asks)
    if one and len(plans) > 1:
        raise UserError("usage.one_card", count=len(plans))


def _answered(
    request: Any, plans: list[Any], limits: Limits, depth: Depth, form: Form
) -> tuple[list[Any], Largest | None]:
    """Print what was asked; return the plans that --check is about, and what --largest found."""
    found = None
    if depth.smallest_card:
        plan_print.smallest(plans[0], plan_exact.smallest(request, plans[0], depth), form)
        return [], found
    if depth.largest:
        for plan in plans:
            found = plan_exact.searched(request, plan, depth)
            if found.value is None or not limits.asks:
                plan_print.largest(plan, found, form)
        if found is None or found.value is None or not limits.asks:
            return [], found
        plans = [request.with_option(plans[0], found.option, found.value)]
    plans = plan_exact.deepened(request, plans, depth)
    if depth.explain:
        plan_exact.explain_command(request, plans[0], depth, as_json=form.as_json)
    elif limits.asks and len(plans) == 1:
        plan_print.answer(request, plans[0], limits, form, found)
    else:
        plan_print.plans(plans, form, limits)
    return plans, found
