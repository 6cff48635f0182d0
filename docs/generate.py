"""Writes the generated parts of README.md and docs/: captured commands, tables of options and commands, schemas, pictures.

    make docs                        write them, and build the site
    python docs/generate.py --check  say what is out of date, exit with 1

A generated part stands between `<!-- generated: NAME -->` and `<!-- end -->`. The part `console` is a block that begins
with `$ foretrain …`: that command is run, and what it prints follows.
"""

import io
import re
import sys
from collections.abc import Callable
from typing import Any

import accuracy_tables
import advice_tables
import cluster_tables
import compare_tables
import contributed_tables
import cuda_truth_tables
import export_tables
import fault_tables
import finetune_tables
import gpu_tables
import growth_page
import inference_tables
import install_tables
import json_schemas
import limit_tables
import man_page
import page_parts
import precision_tables
import prepare_tables
import recipe_tables
import speed_tables
import technique_tables
import toml_schemas
import tune_tables
from consoles import WIDTH, block, shown
from results import ROOT, result
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import MONOKAI

import foretrain
from foretrain.advice.advisor import advise, short_list
from foretrain.advice.asked import Asked
from foretrain.advice.best import best
from foretrain.advice.first_answer import first_answer
from foretrain.advice.record import Advices
from foretrain.analysis import snapshot_file
from foretrain.analysis.log_checks import utilization
from foretrain.app.explain import log_of
from foretrain.base.quantities import parse_bytes, parse_limit
from foretrain.config.option import GROUPS
from foretrain.config.options import OPTIONS
from foretrain.config.resolve import resolve
from foretrain.hardware.catalogue import find
from foretrain.predict.plan import Plan, plan
from foretrain.predict.pretraining import of_plan
from foretrain.predict.within import within
from foretrain.reports import text
from foretrain.reports.document import Document
from foretrain.reports.views import advice_screen
from foretrain.reports.views import compare as compare_view
from foretrain.reports.views import first as first_view
from foretrain.reports.views import limits as limits_view
from foretrain.reports.views import log as log_view
from foretrain.reports.views import plan as plan_view
from foretrain.reports.views import snapshot as snapshot_view

CASES = ROOT / "examples" / "real-cases"


def case(name: str, *, others: str = "", step_s: float | None = None) -> Plan:
    """The plan that the command line makes of a real case."""
    return foretrain.plan(CASES / f"{name}.py", gpu="RTX 4070", used_by_others=others or 0, step_s=step_s)


def terminal(made: Plan, sections: tuple[str, ...] = (), advice: Advices | None = None) -> str:
    """The plan as a terminal shows it, cut to some of its sections."""
    return rendered(plan_view.document(made, advice=advice), sections)


def rendered(document: Document, sections: tuple[str, ...] = ()) -> str:
    """A document as a terminal shows it, cut to some of its sections; trailing blanks removed."""
    console = Console(file=io.StringIO(), width=WIDTH, color_system=None, highlight=False)
    if sections:
        kept = [section for section in document.sections if section.title.id in sections]
        document = Document(document.title, document.subtitle, kept)
    text.render(document, console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    if sections:
        shown = shown.rstrip() + "\n…"
    return "\n".join(line.rstrip() for line in shown.rstrip().splitlines())


def first_screen(command: str, made: Plan, asked: Asked) -> str:
    """What `foretrain plan` prints without --full."""
    console = Console(file=io.StringIO(), width=WIDTH, color_system=None, highlight=False)
    text.render_screen(first_view.screen(made, first_answer(made, asked), asked), console)
    return block(command, console.file.getvalue().rstrip())  # type: ignore[attr-defined]


def first_case_c() -> str:
    path = "examples/real-cases/c.py"
    asked = Asked(words=(path,), gpu="RTX 4070", others="2.1GB", nanogpt_file=True)
    return first_screen(
        f'foretrain plan {path} --gpu "RTX 4070" --used-by-others 2.1GB', case("c", others="2.1GB"), asked
    )


def plan_case_c() -> str:
    made = case("c", others="2.1GB")
    command = 'foretrain plan examples/real-cases/c.py --gpu "RTX 4070" --used-by-others 2.1GB --full'
    sections = ("plan.verdict", "advice.plan_section", "plan.memory", "plan.bytes")
    return block(command, terminal(made, sections, short_list(made, "nanogpt")))


def plan_case_d() -> str:
    made = case("d", step_s=3.9)
    return block(
        'foretrain plan examples/real-cases/d.py --gpu "RTX 4070" --step-time 3.9 --full',
        terminal(made, ("plan.work", "plan.time")),
    )


def start_screen() -> str:
    made = foretrain.plan("gpt2-124m", gpu="RTX 4070", used_by_others="2GB")
    asked = Asked(words=("gpt2-124m",), gpu="RTX 4070", others="2GB")
    return first_screen('foretrain plan gpt2-124m --gpu "RTX 4070" --used-by-others 2GB', made, asked)


def advise_case_c() -> str:
    path, made = "examples/real-cases/c.py", case("c", others="2.1GB")
    asked = Asked(words=(path,), gpu="RTX 4070", others="2.1GB", nanogpt_file=True)
    console = Console(file=io.StringIO(), width=WIDTH, color_system=None, highlight=False)
    text.render_screen(advice_screen.screen(made, advise(made, "nanogpt"), asked), console)
    command = f'foretrain advise {path} --gpu "RTX 4070" --used-by-others 2.1GB'
    return block(command, console.file.getvalue().rstrip())  # type: ignore[attr-defined]


def within_case_d() -> str:
    made = case("d", step_s=3.9)
    document = limits_view.within(made, within(of_plan(made), parse_limit("12h")))
    command = 'foretrain plan examples/real-cases/d.py --gpu "RTX 4070" --step-time 3.9 --within 12h --full'
    return block(command, rendered(document, ("within.section", "within.change")))


def best_model() -> str:
    base = plan(
        resolve([]).config, find("RTX 4070"), used_by_others_bytes=parse_bytes("2GB"), dataset_tokens=3_680_000_000
    )
    document = limits_view.best(base, best(base, parse_limit("20h")))
    command = 'foretrain plan --gpu "RTX 4070" --used-by-others 2GB --best --within 20h --data-tokens 3.68B --full'
    return block(command, rendered(document, ("best.section", "best.binds", "best.candidates")))


def mfu_case_b() -> str:
    resolved = resolve([str(CASES / "b1.py")])
    used = utilization(resolved.config, find("RTX 4070"), resolved.config.tokens_per_step / 134_000)
    command = 'foretrain mfu examples/real-cases/b1.py --tokens-per-s 134k --gpu "RTX 4070"'
    return block(command, rendered(log_view.utilization_document(resolved.name, used)))


def compare_case_b() -> str:
    return block(compare_tables.COMMAND, rendered(compare_view.document(compare_tables.case_b())))


# rich's own without the fonts that it would fetch.
CONSOLE_FORMAT = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL).replace(
    "font-family: Fira Code, monospace", "font-family: ui-monospace, monospace"
)


def picture_of_plan() -> str:
    """The plan of case C as a picture, without the web font that rich would name."""
    console = Console(
        file=io.StringIO(), width=WIDTH, record=True, force_terminal=True, color_system="truecolor", highlight=False
    )
    document = plan_view.document(case("c", others="2.1GB"))
    shown = [s for s in document.sections if s.title.id in ("plan.memory", "plan.bytes")]
    text.render(type(document)(document.title, document.subtitle, shown), console)
    title = 'foretrain plan c.py --gpu "RTX 4070" --used-by-others 2.1GB --full'
    return console.export_svg(title=title, theme=MONOKAI, code_format=CONSOLE_FORMAT, unique_id="plan")


def signed(error: float) -> str:
    """'+0.15 %', without a sign before zero."""
    shown = f"{error * 100:+.2f} %"
    return "0.00 %" if float(shown[:-2]) == 0 else shown


def accuracy() -> str:
    ledger = result("ledger_against_allocator")
    lines = ["| config | measured peak | predicted | error |", "| --- | ---: | ---: | ---: |"]
    for found in ledger["cases"]:
        phase = max(found["measured_bytes"], key=found["measured_bytes"].get)
        predicted, measured = found["predicted_bytes"][phase], found["measured_bytes"][phase]
        error = predicted / measured - 1
        lines.append(
            f"| {found['name']} | {measured / 2**20:,.1f} MiB | {predicted / 2**20:,.1f} MiB | {signed(error)} |"
        )
    lines.append("")
    lines.append(
        f"Median error {ledger['median_abs_error_of_peak'] * 100:.3f} %, worst {ledger['worst_abs_error_of_peak'] * 100:.2f} % "
        f"(measured on a {ledger['machine']['cpu']}, torch {ledger['versions']['torch']}, {ledger['date']}; "
        "`python benchmarks/ledger_against_allocator.py`)."
    )
    return "\n".join(lines)


def explain_case_a() -> str:
    command = 'foretrain plan examples/real-cases/a.py --gpu "RTX 4070" --explain --observed 6582MiB --process 4464MiB'
    return block(command, result("real_cases")["consoles"]["explain_a"])


def exact_case_c() -> str:
    command = 'foretrain plan examples/real-cases/c.py --gpu "RTX 4070" --used-by-others 2.1GB --exact'
    return block(command, result("real_cases")["consoles"]["verdict_c"])


def explain_out_of_memory() -> str:
    """A log that ends in out of memory; its first sections."""
    log = ROOT / "examples" / "logs" / "c-out-of-memory.log"
    document = log_view.document(log_of(log, [str(CASES / "c.py")], "RTX 4070").explanation)
    command = 'foretrain explain examples/logs/c-out-of-memory.log --config examples/real-cases/c.py --gpu "RTX 4070"'
    return block(command, rendered(document, ("oom.section", "oom.saved")))


def explain_snapshot() -> str:
    path = "examples/snapshots/fragmented.pickle"
    shown = rendered(snapshot_view.document(snapshot_file.read(ROOT / path)))
    return block(f"foretrain explain {path}", shown)


def explain_run() -> str:
    return f"```console\n{result('watch_and_explain')['console']}\n```"


def watch_overhead() -> str:
    found = result("watch_and_explain")
    wall = (
        f"in wall time a script that computes on one core took {found['median_overhead'] * 100:+.1f} % longer watched than alone "
        f"(median of {len(found['pairs_s'])} pairs)"
        if found["spread_alone"] < 0.1
        else f"in wall time nothing can be said yet: the machine was shared, and the script alone varied by "
        f"{found['spread_alone'] * 100:.0f} %"
    )
    return (
        f"One sample took {found['sample_s'] * 1e3:.2f} ms of processor time without a card, once a second, "
        f"{found['sample_s'] * 100:.2f} % of one core; {wall} "
        f"({found['machine']['cpu']}, {found['date']}; `python benchmarks/watch_and_explain.py`)."
    )


def truth() -> str:
    found = result("trace_against_allocator")
    summary, a = found["summary"], result("real_cases")["a"]
    return (
        f"Of {summary['configs']} configs, eager and compiled, {summary['exact_to_64_bytes']} traces meet PyTorch's real CPU "
        f"allocator to 64 bytes, the worst is off by {summary['worst_error'] * 100:.3f} % "
        f"(torch {found['versions']['torch']}, {found['date']}; `python benchmarks/trace_against_allocator.py`). The logged RTX 4070 "
        f"run of case A held 4,464 MiB: {a['reserved_bytes'] / 2**20:,.0f} MiB reserved are predicted, "
        f"{a['error'] * 100:+.1f} % with a context of 300 MiB (`python benchmarks/real_cases.py`)."
    )


def exact_cost() -> str:
    found = result("exact_cost")
    rows = {row["plan"]: row for row in found["rows"]}
    eager, compiled = rows["124M eager"], rows["124M compiled"]
    rss = max(found["worker_peak_rss_bytes"].values()) / 2**20
    return (
        f"GPT-2 124M, both steps: {eager['cold_s']:.1f} s eager, {compiled['cold_s']:.0f} s compiled, "
        f"{max(eager['cached_s'], compiled['cached_s']):.2f} s when kept; a worker takes {rss:,.0f} MiB "
        "(2 cores; `python benchmarks/exact_cost.py`)."
    )


def calculators() -> str:
    found = result("calculators")
    lines = ["| calculator | GiB | against the trace | counts |", "| --- | ---: | ---: | --- |"]
    for row in found["rows"]:
        name = " ".join(filter(None, (row["calculator"], row["version"])))
        for answer in row.get("answers", []):
            size = f"{answer['bytes'] / 2**30:.2f}"
            lines.append(
                f"| {name}, {answer['label']} | {size} | {answer['error'] * 100:+.0f} % | {answer['counts']} |"
            )
        if not row.get("answers"):
            lines.append(f"| {name} | – | – | {str(row['failure'])[:120]} |")
    return "\n".join(lines)


def demo_sentence() -> str:
    demo = result("demo")
    run = demo["run"]
    step = next(row for row in demo["comparison"]["time"] if row["id"] == "time.step")
    return (
        f"On {demo['machine']['cpu'].removeprefix('CPU (').removesuffix(')')} (no GPU) it took "
        f"{demo['wall_s'] / 60:.1f} minutes: validation loss from {run['first_val_loss']:.3f} to {run['val_loss']:.3f} nats a byte "
        f"(knowing only how often each byte occurs gives {demo['unigram_entropy']:.3f}); the step took "
        f"{step['measured'] * 1e3:.0f} ms, predicted {step['predicted'] * 1e3:.0f} ms "
        f"({step['low'] * 1e3:.0f} to {step['high'] * 1e3:.0f}). (`python benchmarks/demo.py`, {demo['date']})"
    )


def time_table() -> str:
    return groups_of(
        result("time_against_logs")["groups"], "published runs", ("all", "looked at", "only judged", "nano", "…")
    )


def groups_of(groups: list[dict[str, Any]], head: str, starts: tuple[str, ...]) -> str:
    """Errors and ranges of those groups whose name begins so."""
    lines = [
        f"| {head} | runs | median error | signed | largest (run) | inside the stated range |",
        "| --- | ---: | ---: | ---: | --- | ---: |",
    ]
    for group in groups:
        if group["group"].startswith(starts):
            lines.append(
                f"| {group['group'].removeprefix('by ')} | {group['runs']} | {group['median_abs_error'] * 100:.1f} % | "
                f"{group['median_error'] * 100:+.1f} % | "
                f"{group['worst_abs_error'] * 100:.0f} % ({group['worst']}) | {group['inside']} ({group['inside'] / group['runs']:.0%}) |"
            )
    return "\n".join(lines)


def by_origin() -> str:
    """One line for each source of runs; those that are looked at when a rule is found are named."""
    found = result("time_against_logs")
    return groups_of(found["groups"], "source", ("by ",)) + (
        f"\n\nLooked at when a rule is found: {', '.join(found['looked_at'])}. All other sources are only judged."
    )


def published() -> str:
    """Every published run, doubtful ones marked."""
    found = result("time_against_logs")
    lines = [
        "| run | card | torch | whose step | mode | logged tokens/s | predicted step time | in the range |",
        "| --- | --- | --- | --- | --- | ---: | ---: | --- |",
    ]
    for row in found["cases"]:
        whose = {"nanogpt": "nanoGPT's", "pytorch": "other PyTorch", "other": "other software"}[row["kind"]]
        mark = " ?" if row["doubtful"] else " *" if row["origin"] in found["looked_at"] else ""
        lines.append(
            f"| {row['id']}{mark} | {row['gpu']} | {row['torch']} | {whose} | "
            f"{'compiled' if row['compiled'] else 'eager'} | {row['tokens_per_s']:,.0f} | {row['error'] * 100:+.0f} % | "
            f"{'yes' if row['inside'] else 'no'} |"
        )
    return "\n".join(lines)


def not_predicted() -> str:
    """What the collection has and the table has not."""
    return "\n".join(f"- {line}." for line in result("time_against_logs")["left_out"])


def calibrated() -> str:
    """Predicted against measured on a CPU, in one run."""
    found = result("step_time")
    lines = [
        "| config | dtype | mode | predicted | measured | error |",
        "| --- | --- | --- | ---: | ---: | ---: |",
    ]
    for row in found["cases"]:
        lines.append(
            f"| {row['config']} | {row['dtype']} | {row['mode']} | {row['predicted']['expected_s'] * 1e3:,.0f} ms | "
            f"{row['measured_s'] * 1e3:,.0f} ms | {row['error'] * 100:+.1f} % |"
        )
    return "\n".join([*lines, "", calibrated_sentence()])


def calibrated_sentence() -> str:
    found = result("step_time")
    return (
        f"After `foretrain calibrate`, {found['configs']} steps on a {found['machine']['cpu']}: median error "
        f"{found['median_abs_error'] * 100:.1f} %, worst {found['worst_abs_error'] * 100:.0f} % (torch "
        f"{found['versions']['torch']}, {found['date']}; `python benchmarks/step_time.py`)."
    )


def kept_memory() -> str:
    """What keeping freed memory does."""
    lines = [
        "| config | memory given back | kept | times as fast | process's peak |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for row in result("kept_memory")["cases"]:
        peak = row["kept_peak_bytes"] / row["given_back_peak_bytes"]
        lines.append(
            f"| {row['config']} | {row['given_back_s'] * 1e3:,.0f} ms | {row['kept_s'] * 1e3:,.0f} ms | "
            f"{row['faster']:.2f} | × {peak:.2f} |"
        )
    return "\n".join(lines)


def startup_sentence() -> str:
    found = result("startup")
    seconds = sorted(found["seconds"]["foretrain plan gpt2-124m --gpu 4070"])
    torch = sorted(found["seconds"]["import torch"])
    middle = len(seconds) // 2
    on = found["machine"]["cpu"]
    return (
        f"A new plan of GPT-2 124M takes {seconds[middle]:.1f} s on {on}, and imports no torch (`import torch` alone: {torch[middle]:.1f} s). "
        "A fine-tuning run that does not fit takes seconds more, to look for changes."
    )


def page_speed() -> str:
    found = result("page_speed")
    lines = [
        "| sliders of | changes | median | 95 % within | longest | processor time, mean |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for preset, row in found["dragging"].items():
        times = " | ".join(f"{row[name] * 1e3:,.0f} ms" for name in ("median_s", "p95_s", "highest_s", "processor_s"))
        lines.append(f"| {preset} | {row['answers']} | {times} |")
    size = f"A first visit loads {found['first_load_bytes'] / 1e3:,.0f} kB in all; the server takes {found['resident_bytes'] / 2**20:,.0f} MiB."
    machine = f"(`python benchmarks/page_speed.py`, {found['machine']['cpu']}, {found['date']}; from a change to the last byte of its answer, while the load of the machine was {found['load']:.1f})"
    return "\n".join([*lines, "", f"{size} {machine}"])


def static_site() -> str:
    found = result("static_site")
    first, again = found["visits"]
    lines = ["| sliders of | changes | median | 95 % within | longest |", "| --- | ---: | ---: | ---: | ---: |"]
    for preset, row in found["dragging"].items():
        times = " | ".join(f"{row[name] * 1e3:,.0f} ms" for name in ("median_s", "p95_s", "highest_s"))
        lines.append(f"| {preset} | {row['answers']} | {times} |")
    size = f"A visit loads {found['load_bytes'] / 1e6:.1f} MB, {found['packed_bytes'] / 1e6:.1f} MB from a host that compresses."
    moments = (
        f"The form with its first answer is there after {first['first_picture_s']:.1f} s, Python after {first['python_ready_s']:.1f} s "
        f"({again['python_ready_s']:.1f} s on the second visit), its first own answer {first['first_answer_s'] - first['python_ready_s']:.1f} s later."
    )
    machine = f"(`python benchmarks/static_site.py`, Chromium on {found['machine']['cpu']}, {found['date']}; from a change until its answer is drawn, the host on the same machine, while its load was {found['load']:.1f})"
    return "\n".join([*lines, "", f"{size} {moments} {machine}"])


def option_tables() -> str:
    parts = []
    for group in GROUPS:
        parts.append(f"## {group}\n\n| option | default | unit | limits | what |\n| --- | --- | --- | --- | --- |")
        for knob in OPTIONS.values():
            if knob.group == group:
                mark = " ¹" if knob.ours else " ²" if knob.inert else ""
                default = f"`{knob.default}`" if knob.default != "" else "empty"
                limits = knob.limits if knob.limits != knob.help else ""
                parts.append(f"| `{knob.name}`{mark} | {default} | {knob.unit} | {limits} | {knob.help} |")
        parts.append("")
    return "\n".join(parts).rstrip()


PARTS: dict[str, Callable[[], str]] = {
    **page_parts.PARTS,
    **accuracy_tables.PARTS,
    **cluster_tables.PARTS,
    **cuda_truth_tables.PARTS,
    **finetune_tables.PARTS,
    **inference_tables.PARTS,
    **limit_tables.PARTS,
    "contributed": contributed_tables.contributed,
    "first-screen": start_screen,
    "schemas": json_schemas.table,
    "base-install": install_tables.base_install,
    "pull-request": install_tables.pull_request,
    "first-case-c": first_case_c,
    "plan-case-c": plan_case_c,
    "plan-case-d": plan_case_d,
    "advise-case-c": advise_case_c,
    "advice-rules": advice_tables.rules,
    "advice-tolls": advice_tables.tolls,
    "advice-held": advice_tables.held,
    "within-case-d": within_case_d,
    "best": best_model,
    "mfu-case-b": mfu_case_b,
    "compare-case-b": compare_case_b,
    "compare-power": compare_tables.power,
    "accuracy": accuracy,
    "accuracy-sentence": lambda: accuracy().splitlines()[-1],
    "explain-out-of-memory": explain_out_of_memory,
    "explain-snapshot": explain_snapshot,
    "explain-run": explain_run,
    "watch-overhead": watch_overhead,
    "truth": truth,
    "calculators": calculators,
    "published": published,
    "published-by": by_origin,
    "published-groups": time_table,
    "published-not": not_predicted,
    "calibrated": calibrated,
    "calibrated-sentence": calibrated_sentence,
    "kept-memory": kept_memory,
    "exact-cost": exact_cost,
    "explain-case-a": explain_case_a,
    "exact-case-c": exact_case_c,
    "demo": demo_sentence,
    "time": time_table,
    "startup": startup_sentence,
    "options": option_tables,
    "page-speed": page_speed,
    "static-site": static_site,
    "faults": fault_tables.faults,
    "checkpoint-cost": fault_tables.cost,
    "fault-catalogue": fault_tables.catalogue,
    "soak": fault_tables.soak,
    "resume-keys": fault_tables.resume,
    "growth-steps": growth_page.steps,
    "growth-memory": growth_page.memory,
    "growth-tools": growth_page.tools,
    "growth-machine": growth_page.machine,
    "tool-speed": growth_page.speed,
    "hopper-summary": gpu_tables.summary,
    "hopper-finetuning": gpu_tables.finetuning,
    "hopper-ways": gpu_tables.ways,
    "hopper-kernels": gpu_tables.kernels,
    "hopper-runs": gpu_tables.whole_runs,
    "hopper-forecasts": gpu_tables.forecasts,
    "hopper-times": gpu_tables.times,
    "hopper-memory": gpu_tables.memory,
    "hopper-sentence": gpu_tables.sentence,
    "against-nanogpt": speed_tables.against,
    "speed-machine": speed_tables.machine,
    "against-real-nanogpt": speed_tables.real,
    "compile-start": speed_tables.start,
    "prepare": prepare_tables.prepare,
    "prepare-stream": prepare_tables.stream,
    "time-to-loss": recipe_tables.time_to_loss,
    "time-to-loss-sentence": recipe_tables.sentence,
    "time-to-loss-tokenizer": recipe_tables.tokenizer,
    "time-to-loss-step": recipe_tables.step_seconds,
    "recipe-parts": recipe_tables.parts,
    "recipe-tried": recipe_tables.tried,
    "recipe-tuning": recipe_tables.tuning,
    "techniques": technique_tables.registry,
    "small-memory": technique_tables.small_memory,
    "small-memory-cpu": technique_tables.cpu_sentence,
    "precision-losses": precision_tables.losses,
    "precision-speeds": precision_tables.speeds,
    "precision-moments": precision_tables.moments,
    "tune-benchmark": tune_tables.against_everything,
    "tune-console": tune_tables.console,
    "llama-cpp": export_tables.llama_cpp,
}
_PART = re.compile(r"(<!-- generated: (?P<name>[a-z-]+) -->)(?P<old>.*?)(<!-- end -->)", re.DOTALL)
_COMMAND = re.compile(r"^\$ (foretrain .+)$", re.MULTILINE)


def fill(page: str) -> str:
    """The page with each generated part made anew."""
    return _PART.sub(lambda m: f"{m[1]}\n{_made(m['name'], m['old'])}\n{m[4]}", page)


def _made(name: str, old: str) -> str:
    if name != "console":
        return PARTS[name]()
    command = _COMMAND.findall(old)[0]
    return block(command, shown(command))


def main() -> int:
    check = "--check" in sys.argv
    pictures = ROOT / "docs" / "pictures"
    wanted = {
        pictures / "plan.svg": picture_of_plan(),
        **json_schemas.files(),
        **toml_schemas.files(),
        **man_page.files(),
    }
    wanted |= {pictures / name: drawn for name, drawn in growth_page.pictures().items()}
    wanted[pictures / "limit.svg"] = limit_tables.picture()
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        wanted[page] = fill(page.read_text("utf-8"))
    stale = [path for path, content in wanted.items() if not path.is_file() or path.read_text("utf-8") != content]
    for path in stale:
        print(f"{'out of date' if check else 'wrote'}: {path.relative_to(ROOT)}")
        if not check:
            path.write_text(wanted[path], "utf-8")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
