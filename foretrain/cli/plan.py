"""`foretrain plan`: what a run will take, before it is started."""

from dataclasses import dataclass, replace

import typer

from foretrain.advise.micro_batch import Choice
from foretrain.cli import plan_exact, plan_limits
from foretrain.cli import plan_options as o
from foretrain.cli.common import CONFIG_CONTEXT, OUT, Json, Quiet, Words, print_error, print_json, print_notes
from foretrain.cli.old_options import typed
from foretrain.cli.plan_exact import Depth
from foretrain.cli.plan_limits import Limits
from foretrain.config import RunConfig
from foretrain.configfile import KNOBS, ResolvedConfig, Trainer, resolve
from foretrain.errors import UserError
from foretrain.hardware import NANOGPT_PEAK_FLOP_PER_S, Gpu, catalogue, detect, find, stated_bytes
from foretrain.messages import knob_help, knob_unit
from foretrain.predict.plan import Plan

MOST_CARDS = 64  # of --gpu; the catalogue has fewer

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

foretrain plan my.py --gpu 4070 --within 12h --write shorter.toml   (also 5EUR, 3kWh; --tokens 10B)

foretrain plan --gpu 4070 --best --within 20h --data-tokens 3.68B   (which model?)"""


@dataclass(frozen=True)
class Target:
    """A device to plan for, and what others hold there."""

    gpu: Gpu
    used_by_others_bytes: int


def add_to(app: typer.Typer) -> None:
    app.command("plan", context_settings=CONFIG_CONTEXT, epilog=EPILOG)(plan_command)


def plan_command(
    words: Words = None,
    gpu: o.Gpu = "auto",
    others: o.Others = "",
    step_time: o.StepTime = None,
    logged_mfu: o.LoggedMfu = None,
    check: o.Check = False,
    trainer: o.Trainer = "",
    exact: o.Exact = False,
    explain: o.Explain = False,
    observed: o.Observed = "",
    process: o.Process = "",
    largest: o.Largest = "",
    snapshot: o.Snapshot = None,
    alloc_conf: o.AllocConf = "",
    show_config: o.ShowConfig = False,
    price: o.Price = None,
    co2: o.Co2 = None,
    within: o.Within = None,
    tokens: o.Tokens = None,
    best: o.Best = False,
    data_tokens: o.DataTokens = None,
    write: o.Write = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Plan a run: memory by phase and component, FLOPs, hours, energy and cost. Needs no GPU and no torch."""
    resolved = plan_exact.with_trainer(resolve(words or []), trainer)
    limits = Limits(price, co2, within, tokens, best, data_tokens, write)
    limits = replace(limits, given=frozenset(resolved.sources))
    resolved = plan_limits.priced(resolved, limits)
    print_notes(resolved.notes, quiet=quiet)
    if show_config:
        _show_config(resolved, as_json)
        return
    step = resolved.step
    depth = Depth(exact, explain, observed, process, largest, snapshot, alloc_conf, quiet)
    plan_exact.check_depth(depth, resolved.files)
    found = targets(gpu, others, resolved.config)
    plan_exact.check_readings(depth, [target.gpu for target in found])
    _check_targets(len(found), depth, limits, step_time, logged_mfu)
    plans = make_plans(resolved, found, limits, step_time, logged_mfu)
    if limits.asks:
        plan_limits.answer(plans[0], step, limits, as_json=as_json, quiet=quiet)
    elif largest:
        plan_exact.largest_command(plans[0], step, depth, as_json=as_json, check=check)
        return
    else:
        plans = [plan_exact.deepen(plan, depth) for plan in plans]
        if snapshot:
            plan_exact.write_snapshot(plans[0], step, depth)
        if explain:
            plan_exact.explain_command(plans[0], step, depth, as_json=as_json)
        else:
            plan_limits.print_plans(plans, as_json=as_json)
    if check and not best:
        _check(plans)


def _check_targets(count: int, depth: Depth, limits: Limits, step_time: float | None, logged_mfu: float | None) -> None:
    """What can only be asked of one card."""
    plan_limits.check_limits(limits, count, depth.wants_trace or bool(depth.largest))
    if (depth.explain or depth.largest or depth.snapshot) and count > 1:
        raise UserError("usage.one_card", count=count)
    if (step_time is not None or logged_mfu is not None) and count > 1:
        option = "--step-time" if step_time is not None else "--logged-mfu"
        raise UserError("usage.one_speed", option=option, count=count)


def make_plans(
    resolved: ResolvedConfig, found: list[Target], limits: Limits, step_time: float | None, logged_mfu: float | None
) -> list[Plan]:
    """A plan for each target, with its own rent where one is given for it."""
    rents = plan_limits.prices_of(limits, resolved.config, [target.gpu for target in found])
    plans = []
    for target, rent in zip(found, rents, strict=True):
        own = replace(resolved, config=resolved.config.model_copy(update={"price_per_hour": rent}))
        plans.append(make_plan(own, target, step_time, logged_mfu))
    return plans


def _check(plans: list[Plan]) -> None:
    """Exit with 3 when the step that the headline means does not fit; the one object of --json is the plan, which says
    so too."""
    for p in plans:
        if p.verdict == "does_not_fit":
            id = "check.failed_nanogpt" if p.step == "nanogpt" else "check.failed_foretrain"
            error = UserError(
                id, name=p.name, gpu=p.gpu.name, needed=p.memory_of(p.step).needed_bytes,
                available=p.available_bytes or 0,
            )  # fmt: skip
            print_error(error, as_json=False)
            raise typer.Exit(int(error.exit_code))


def targets(names: str, others: str, config: RunConfig) -> list[Target]:
    """The devices that were named, or the card of this machine."""
    used_by_others_bytes = stated_bytes(others, typed("--used-by-others")) if others else None
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if len(wanted) > MOST_CARDS:
        raise UserError("usage.too_many_cards", count=len(wanted), most=MOST_CARDS)
    if wanted in ([], ["auto"]):
        return [_here(config, used_by_others_bytes)]
    found = []
    for name in wanted:
        if name.lower() == "cpu":
            found.append(_cpu(used_by_others_bytes))
        elif name.lower() == "auto":
            found.append(_here(config, used_by_others_bytes))
        else:
            found.append(_checked(find(name), used_by_others_bytes or 0))
    return found


def _checked(gpu: Gpu, used_by_others_bytes: int) -> Target:
    if gpu.memory_bytes is not None and used_by_others_bytes > gpu.memory_bytes:
        raise UserError("gpu.others_beyond", others=used_by_others_bytes, memory=gpu.memory_bytes, gpu=gpu.name)
    return Target(gpu, used_by_others_bytes)


def _here(config: RunConfig, used_by_others_bytes: int | None) -> Target:
    """The card in this machine with what is in use there now; the CPU where the config asks for it."""
    if config.device == "cpu":
        return _cpu(used_by_others_bytes)
    index = int(config.device.partition(":")[2] or 0)
    found = detect(index)
    if found is None:
        raise UserError("gpu.none_here", count=len(catalogue()))
    return _checked(found.gpu, found.used_bytes if used_by_others_bytes is None else used_by_others_bytes)


def _cpu(used_by_others_bytes: int | None) -> Target:
    from foretrain.cpu import available_memory_bytes, cpu_device

    gpu = cpu_device()
    available = available_memory_bytes()
    if used_by_others_bytes is None:
        used_by_others_bytes = max(0, gpu.memory_bytes - available) if gpu.memory_bytes and available else 0
    return _checked(gpu, used_by_others_bytes)


def make_plan(
    resolved: ResolvedConfig, target: Target, step_time: float | None = None, logged_mfu: float | None = None
) -> Plan:
    """The plan of a resolved config on a target, with the dataset of this machine where it is there."""
    from foretrain.lm.config_data import of_config
    from foretrain.lm.shape import ModelShape
    from foretrain.predict.data_notes import data_notes
    from foretrain.predict.plan import plan

    data = of_config(resolved)
    config = data.config
    if step_time is not None and logged_mfu is not None:
        raise UserError("usage.two_speeds")
    for option, value in (("--step-time", step_time), ("--logged-mfu", logged_mfu)):
        if value is not None and not 1e-6 <= value <= 1e9:
            raise UserError("usage.bad_step_time", option=option, value=value)
    if logged_mfu is not None:
        flops = ModelShape.of(config).flops_per_token * config.tokens_per_step
        step_time = flops / (logged_mfu / 100 * NANOGPT_PEAK_FLOP_PER_S)
    decided = auto_batch(config, target, resolved.step) if config.auto_batch_size else None
    made = plan(
        decided.config if decided else config, target.gpu, name=resolved.name,
        used_by_others_bytes=target.used_by_others_bytes,
        dataset_tokens=data.tokens, dataset_source=data.source, logged_step_s=step_time,
    )  # fmt: skip
    notes = (*([decided.note] if decided else []), *made.notes, *data_notes(made.config, data.info))
    return made.model_copy(update={"notes": notes, "step": resolved.step, "assumptions": data.assumptions})


def auto_batch(config: RunConfig, target: Target, step: Trainer) -> Choice:
    """The micro-batch that batch_size = auto gives on a target."""
    from foretrain.advise.micro_batch import choose
    from foretrain.predict.plan import available, choose_dtype

    room, _ = available(config, target.gpu, target.used_by_others_bytes)
    return choose(config, target.gpu, choose_dtype(config, target.gpu)[0], room, step)


def with_dataset(resolved: ResolvedConfig) -> RunConfig:
    """The config with its dataset's vocabulary, where it sets none itself."""
    from foretrain.lm.config_data import of_config

    return of_config(resolved).config


def _show_config(resolved: ResolvedConfig, as_json: bool) -> None:
    config = resolved.config
    if as_json:
        sources = {name: resolved.sources.get(name, "default") for name in KNOBS}
        print_json({"schema": "foretrain.config/1", "config": config.model_dump(mode="json"), "sources": sources})
        return
    from foretrain.report import text
    from foretrain.report.document import Document, Message, Section, Table

    rows = tuple(
        (
            knob.name,
            str(getattr(config, knob.name)),
            knob_unit(knob.unit),
            resolved.sources.get(knob.name, "default"),
            knob_help(knob.name, knob.help),
        )
        for knob in KNOBS.values()
    )
    columns = tuple(Message(f"column.{name}") for name in ("key", "value", "unit", "source", "help"))
    section = Section(Message("config.knobs"), (Table(columns, rows),))
    text.render(Document(Message("config.title", {"name": resolved.name}), Message("config.subtitle"), [section]), OUT)
