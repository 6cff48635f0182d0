"""The generated parts about the product: advice, comparison, several cards, inference, options, exit codes, installing."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import command_pages
from tables import ROOT, fill, part, result, table

import foretrain
from foretrain.advice.advisor import EACH_MORE, TOLLS
from foretrain.advice.rules import RULES
from foretrain.base.errors import EXIT_CODE_OF, ExitCode
from foretrain.base.messages import say
from foretrain.base.quantities import parse_bytes
from foretrain.base.units import format_bytes, format_small_percent, format_small_signed_percent
from foretrain.cli.repository import Answer, Change, in_short, markdown
from foretrain.config.finetune.options import ASKED, FINETUNE_OPTIONS
from foretrain.config.inference import CACHES, FORMATS
from foretrain.config.option import GROUPS, Option
from foretrain.config.options import OPTIONS
from foretrain.config.resolve import resolve
from foretrain.hardware.catalogue import find
from foretrain.hardware.links import links
from foretrain.measure.verify_record import CONTRIBUTED, Verification, read
from foretrain.predict.inference import speed
from foretrain.predict.memory import StepName
from foretrain.predict.plan import Plan, plan

LEARNING = {
    "exact": "exact", "rounding": "same in expectation", "other tokens": "other tokens per step",
    "other optimizer": "other optimizer", "other model": "other model",
}  # fmt: skip


@part("advice-rules")
def rules() -> str:
    """Return one row a rule, in the order in which users can afford them."""
    rows = []
    for rule in (each for each in RULES if not each.several):
        what, costs = (say(f"rule.{rule.id}.{key}") for key in ("what", "costs"))
        learning = LEARNING[rule.exactness] + (" ¹" if rule.exactness == "exact" and rule.redraws else "")
        who = "foretrain" if rule.ours or rule.id == "foretrain_step" else "both"
        rows.append(f"{what} | {costs} | {learning} | {who}{', `--exact` only' if rule.traced else ''}")
    return table("what | what it costs | learning | trainer", rows)


@part("advice-tolls")
def tolls() -> str:
    named = ", ".join(f"{LEARNING[kind]} {toll * 100:.0f}%" for kind, toll in TOLLS.items())
    return f"{named}; each change after the first {EACH_MORE * 100:.0f}%."


@part("advice-held")
def held() -> str:
    found = result("advice")
    return fill(
        "{pairs} random runs on random cards got {advices:,} suggestions: {denied_by_plan} whose fit a new plan of the changed config "
        "denies, and none whose figures differ by more than {promise:.2g}% from it. Of {do_not_fit} runs that do not fit with their "
        "margin, a search over every set of changes finds a fit for {with_a_fit_in_the_space}: {of_these_without_advice} of these got "
        "no suggestion, {of_these_less_exact_than_possible} only a less exact one. {traced_advices} suggestions of {traced_runs} small eager "
        "runs were traced: {denied_by_trace} do not fit by the trace, {tight_by_trace} fit without their margin only. Median "
        "{median_s:.2s} of processor time, longest {longest_s:.1s}. (`python benchmarks/advice.py`, {date})",
        found["summary"], promise=found["summary"]["worst_promise"] * 100, date=found["date"],
    )  # fmt: skip


@part("compare-power")
def power() -> str:
    """Return right answers of 100, by noise and length."""
    found = result("compare_power")
    rows = []
    for row in found["synthetic"]:
        right = [
            found["pairs"] - row["same"]["any"],
            *(n for key in ("speed_found", "loss_found", "unlike_lengths") for n in row[key].values()),
        ]
        rows.append(f"{row['noise']} | {row['steps']:,} | {' | '.join(map(str, right))}")
    end = (
        "Measured: the {b1.steps} undisturbed steps that case B1's log prints lie {b1.step_deviation:.2%} apart (one standard "
        "deviation), its evaluations of 3.3 M tokens {b1.evaluation_deviation:.2%} from their neighbours. {trained.runs} runs of a tiny "
        "model on a CPU ({machine.cpu}, {date}) that differ in their seed alone: steps {trained.step_deviation:.1%} apart, training losses "
        "{trained.train_loss_deviation:.2%}, validation losses {trained.val_loss_deviation:.2%}; of their {trained.pairs} pairs "
        "{trained.called_different.tokens} were called different in what a token teaches and {trained.called_different.speed} in speed: "
        "other programs ran on the machine, and a step was a fifth longer; no setting took the blame. Between starts on a card nothing "
        "has been measured yet."
    )
    return table(
        "noise | steps > | same but for the seed > | 2% faster > | 3% faster > | 5% less loss left > | 10% less > | unlike lengths, same > | "
        "unlike, 3% faster >",
        rows, "", fill(end, found),
    )  # fmt: skip


VERDICTS = {"fits": "fits", "tight": "tight", "does_not_fit": "does not fit", None: "–"}
# (advice, the options of case C that it means, its effect on learning), of nanoGPT's options and of foretrain's
CIRCULATING: dict[StepName, tuple[tuple[str, dict[str, Any], str], ...]] = {
    "nanogpt": (
        ("halve `batch_size`, double accumulation", {"batch_size": 8, "gradient_accumulation_steps": 64}, "nothing"),
        ("fewer `eval_iters`: 20", {"eval_iters": 20}, "a noisier validation loss"),
        ("a narrower model: `n_embd` 384", {"n_embd": 384}, "a smaller model"),
        (
            "`block_size` 256, same tokens per step", {"block_size": 256, "gradient_accumulation_steps": 128},
            "the model sees a quarter of the context",
        ),
    ),
    "foretrain": (
        ("a smaller evaluation batch: 4", {"eval_batch_size": 4}, "nothing"),
        ("a shorter context in evaluation: 256", {"eval_block_size": 256}, "a validation loss at a shorter context"),
        ("activation (“gradient”) checkpointing", {"activation_checkpointing": True}, "nothing"),
        ("the loss in chunks of 1,024 tokens", {"loss_chunk_size": 1024}, "nothing"),
    ),
}  # fmt: skip


@part("circulating-advice")
def circulating() -> str:
    """Return what is often advised, planned for the real case C."""
    config, card = resolve([str(ROOT / "examples" / "real-cases" / "c.py")]).config, find("RTX 4070")

    def planned(step: StepName, **changes: Any) -> tuple[Plan, int, float]:
        made = plan(config.model_copy(update=changes), card, used_by_others_bytes=parse_bytes("2.1GB"))
        timing = made.timing_of(step)
        assert timing is not None
        return made, made.memory_of(step).worst.needed_expected_bytes, timing.total_s.expected_s

    rows = []
    for step, advice in CIRCULATING.items():
        base, most, longest = planned(step)
        name, same = ("nanoGPT", "") if step == "nanogpt" else ("foretrain", "nothing")
        rows.append(
            f"**{name}'s step, current config** | {format_bytes(most)} |  | {VERDICTS[base.verdict_of(step)]} |  | {same}"
        )
        for change, changes, learning in advice:
            made, needs, took = planned(step, **changes)
            rows.append(
                f"{change} | {format_bytes(needs)} | {format_bytes(most - needs)} | {VERDICTS[made.verdict_of(step)]} | "
                f"{(took / longest - 1) * 100:+.1f}% | {learning}"
            )
    return table("advice | needs about > | saves > | verdict | time of the run > | changes in the result", rows)


@part("cluster-links")
def link_names() -> str:
    rows = []
    for link in links().values():
        cards = [*link.cards, *link.joins, *link.between]
        usual = ", ".join(cards[:4]) + (", …" if len(cards) > 4 else "")
        worst = f" (worst published {link.least_bytes_per_s / 1e9:.2g})" if link.least_share else ""
        rows.append(f"`{link.name}` | {', '.join(link.aliases)} | {link.bytes_per_s / 1e9:.3g}{worst} | {usual}")
    return table("name | also | GB/s as NCCL counts > | usual for", rows)


@part("cluster-measured")
def cluster() -> str:
    return table(
        "published runs | figures > | median error > | median absolute error > | above 20% (memory: 5%) > | in the stated range >",
        (
            fill(
                "{name} | {rows} | {median_error:+.1p} | {median_abs_error:.1p} | {misses} | {inside}", one,
                name=name, inside=one["in_range"] if name.startswith("time") else "",
            )
            for name, one in result("cluster_measured")["summary"].items()
        ),
    )  # fmt: skip


@part("cluster-sentence")
def cluster_sentence() -> str:
    found = result("cluster_measured")
    worlds, fits = [row["world"] for row in found["rows"]], found["fits"]
    return fill(
        "{rows} published times of a step on {low} to {high} cards: the median absolute error is {median_abs_error:.1p}, "
        "{in_range} are in the stated range (`python benchmarks/cluster_measured.py`, {date}). Of llm-foundry's {runs} runs, each of "
        "which fitted its cards, {fit} are said to fit. Nothing was measured by us.",
        found["summary"]["time: all"], low=min(worlds), high=max(worlds), date=found["date"], runs=fits["rows"],
        fit=fits["rows"] - len(fits["refused"]),
    )  # fmt: skip


@part("inference-summary")
def inference() -> str:
    """Return how many rows are met, by purpose and by engine."""
    tokens = {"generated": "generated", "read": "of a prompt", "file": "sizes of files"}
    uses = {
        "tune": "used to fit", "held out": "held out", "host": "chose the reading of the computer's memory",
        "older": "older builds of llama.cpp (2023, 2024)",
    }  # fmt: skip
    rows = []
    for name, found in result("inference_published")["summary"].items():
        what, use, engine = name.split(", ")
        counts = fill("{rows} | {within_15_percent} | {mean_off:.1p} | {largest_off:.1p}", found)
        rows.append(f"{tokens[what]} | {uses[use]} | {engine} | {counts}")
    return table("what | rows | engine | how many | within 15% | mean distance | largest", rows)


@part("inference-formats")
def formats() -> str:
    weights = ", ".join(f"`{name}` {form.block:g}" for name, form in FORMATS.items())
    caches = ", ".join(f"`{name}` {bits:g}" for name, bits in CACHES.items())
    return f"Weights, bits per number in the blocks: {weights}. KV cache: {caches}."


@part("inference-constants")
def constants() -> str:
    found = {
        "share of the card's bandwidth for weights": f"{speed.BANDWIDTH_SHARE:.0%}",
        "share of it for keys and values": f"{speed.CACHE_SHARE:.0%}",
        "HBM against its data sheet": f"{speed.HBM_SHARE:.1%}",
        "time per layer": f"{1e6 * speed.LAYER_S:.0f} µs; {1e6 * speed.EXPERTS_S:.0f} µs more with experts",
        "weights of few bits that a multiprocessor unpacks in a clock (llama.cpp)": f"{speed.UNPACKED_PER_CLOCK}",
        "more of that time for each further text": f"{speed.UNPACKED_MORE:.0%}",
        "share of the peak of matmuls, of attention, in a prompt": f"{speed.PROMPT_SHARE:.0%}, {speed.ATTENTION_SHARE:.0%}",
        "share of the peak with several texts at once": f"{speed.BATCH_SHARE:.0%}",
        "torchao's int8 and int4 kernels against bf16's": f"{speed.KERNEL_SHARE['int8']:.0%}, {speed.KERNEL_SHARE['int4']:.0%}",
    }
    return table("constant | value", (f"{name} | {value}" for name, value in found.items()))


NONE = "Nobody has contributed a card yet. Be the first; it takes about ten minutes."


def files(folder: Path = ROOT / CONTRIBUTED) -> list[tuple[str, Verification]]:
    """Return (file's name, what is in it), the newest first within a card. Raises UserError for a file that is damaged."""
    found = [(path.name, read(path)) for path in sorted(folder.glob("*.json"))]
    found.sort(key=lambda pair: pair[1].date, reverse=True)
    return sorted(found, key=lambda pair: pair[1].machine.device)


def obstacle(found: Verification) -> str:
    """Return why a file cannot be shown as a real machine's; '' where it can."""
    if found.machine.kind == "cuda" and not re.fullmatch(r"\d+(\.\d+)+", found.machine.driver):
        return f"the driver {found.machine.driver!r} is not NVIDIA's"
    return "" if found.of("measured") else "no case was measured"


@part("contributed")
def contributed(folder: Path = ROOT / CONTRIBUTED) -> str:
    """Return a section per card, or a sentence where there is none."""
    parts = []
    for device, group in groupby(files(folder), key=lambda pair: pair[1].machine.device):
        parts += [f"## {escaped(device)}", *(measured_on_a_card(name, found) for name, found in group)]
    return "\n\n".join(parts) or NONE


def measured_on_a_card(name: str, found: Verification) -> str:
    if reason := obstacle(found):
        raise SystemExit(f"{CONTRIBUTED}/{name}: {reason}")
    machine, versions = found.machine, found.versions
    facts = [
        found.date,
        found.name and f"contributed by [{found.name}](https://github.com/{found.name})",  # its letters are checked
        f"torch {escaped(versions.torch)}",
        machine.driver and f"driver {escaped(machine.driver)}",
        machine.memory_bytes and format_bytes(machine.memory_bytes),
        escaped(machine.system),
        f"foretrain {escaped(versions.foretrain)} ({escaped(versions.code)})",
    ]
    counts = f"{len(found.of('measured'))} of {len(found.outcomes)} cases measured"
    if ran_out := len(found.of("out_of_memory")):
        counts += f"; {ran_out} ran out of memory although predicted to fit"
    rows = []
    for each in found.by_quantity:
        inside = "" if each.inside is None else f"{each.inside} of {each.cases}"
        rows.append(
            f"{say(f'verify.quantity.{each.quantity}')} | {each.cases} | {format_small_percent(each.median)} | "
            f"{format_small_signed_percent(each.worst)} | {inside} | {escaped(each.worst_case)}"
        )
    head = f"{' · '.join(str(fact) for fact in facts if fact)}. {counts} ([file](../{CONTRIBUTED}/{name}))."
    return f"{head}\n\n" + table(
        "quantity | cases > | median error > | worst error > | in the stated range > | worst in", rows
    )


def escaped(text: str) -> str:
    """Escape a stranger's text for Markdown."""
    return re.sub(r"([\\`*_{}\[\]<>#|!~])", r"\\\1", text)


def on(found: dict[str, Any]) -> str:
    return found["machine"]["cpu"].removeprefix("CPU (").removesuffix(")")


@part("demo")
def demo() -> str:
    found = result("demo")
    step = next(row for row in found["comparison"]["time"] if row["id"] == "time.step")
    times = {key: step[key] * 1e3 for key in ("measured", "predicted", "low", "high")}
    return fill(
        "On {on} (no GPU) it took {minutes:.1f} minutes: validation loss from {run.first_val_loss:.3f} to {run.val_loss:.3f} nats per byte "
        "(a byte-frequency baseline scores {unigram_entropy:.3f}); the step took {measured:.0f} ms, predicted {predicted:.0f} ms "
        "({low:.0f} to {high:.0f}). (`python benchmarks/demo.py`, {date})",
        found, on=on(found), minutes=found["wall_s"] / 60, **times,
    )  # fmt: skip


def block(*lines: str) -> str:
    return "\n".join(["```console", *lines, "```"])


@part("exact-case-c")
def exact_case_c() -> str:
    """Return what takes minutes to print."""
    command = 'foretrain plan examples/real-cases/c.py --gpu "RTX 4070" --used-by-others 2.1GB --exact'
    return block(f"$ {command}", result("real_cases")["consoles"]["verdict_c"])


part("explain-run")(lambda: block(result("watch_and_explain")["console"]))
part("commands")(command_pages.reference)


@part("exit-codes")
def exit_codes() -> str:
    rows = []
    for code in ExitCode:
        families = ", ".join(f"`{family}.*`" for family, own in EXIT_CODE_OF.items() if own == code)
        rows.append(f"{int(code)} | {command_pages.MEANINGS[code.name]} | {families}")
    return table("code > | meaning | ids of its errors", rows)


def option_table(options: Iterable[Option], defaults: Mapping[str, Any], mark: Callable[[Option], str]) -> str:
    rows = []
    for option in options:
        value = defaults.get(option.name, option.default)
        shown = f"`{value}`" if value != "" else "empty"
        limits = ", ".join(
            each for each in (option.unit, option.limits if option.limits != option.help else "") if each
        )
        rows.append(f"`{option.name}`{mark(option)} | {shown} | {option.help} | {limits}")
    return table("option | default | what | limits", rows)


@part("options")
def options() -> str:
    parts = []
    for group in GROUPS:
        own = (option for option in OPTIONS.values() if option.group == group)
        shown = option_table(own, {}, lambda option: " ¹" if option.ours else " ²" if option.inert else "")
        parts += [f"### {group}", shown]
    return "\n\n".join(parts)


@part("finetune-options")
def finetune_options() -> str:
    """Return the options of fine-tuning, with the defaults of a model that is named without a trainer's file."""
    parts = []
    for group in GROUPS:
        own = [option for option in FINETUNE_OPTIONS.values() if option.group == group]
        if own:
            parts += [f"### fine-tuning: {group}", option_table(own, ASKED, lambda option: "")]
    return "\n\n".join(parts)


@part("base-install")
def base_install() -> str:
    """Return packages, bytes and seconds of the first commands in an empty environment, by Python."""
    found, rows = result("base_install"), []
    for version, row in found.items():
        demo = (
            fill("{seconds:.0s}, loss {first_val_loss:.2f} to {val_loss:.2f}", row["train"])
            if row.get("train")
            else "not run"
        )
        rows.append(
            fill("{version} | {count} | {size_bytes:.1MB} MB | {first_plan_s:.2s} | {second_plan_s:.2s} | {demo}", row,
                 version=version, count=len(row["packages"]), demo=demo)
        )  # fmt: skip
    one = next(iter(found.values()))
    busy = any((row.get("load") or 0) > 3 for row in found.values())
    network = "the network at hand" if any(row["network"] for row in found.values()) else "no network"
    return table(
        "Python | packages > | size > | first `plan` > | second `plan` > | `demo` with `[train]`", rows, "",
        f"Measured on {one['system']}, {one['date']}: a fresh virtual environment, an empty home, no compiler, {network}; "
        + "the machine was busy, so times are upper bounds; " * busy
        + "the size is that of the packages without pip (`python release/empty_root.py dist --train`).",
    )  # fmt: skip


@part("pull-request")
def pull_request() -> str:
    def answer(batch_size: int) -> Answer:
        return in_short(
            json.loads(foretrain.plan("gpt2-124m", gpu="RTX 4070", batch_size=batch_size).model_dump_json())
        )

    text = markdown([Change("config/train.toml", answer(8), answer(24))], ["--gpu=RTX 4070"])
    return "\n".join(line for line in text.splitlines() if not line.startswith(("<!--", "###"))).strip()
