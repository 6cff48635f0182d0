"""The generated parts about time: published runs, calibrated and measured steps, an H100, the machine's limit, the tools."""

from collections.abc import Callable
from statistics import median
from types import SimpleNamespace
from typing import Any

from tables import MIB, declare, fill, mode, part, result, table

from foretrain.config.options import RunConfig
from foretrain.config.shape import ModelShape
from foretrain.hardware.catalogue import find
from foretrain.predict.memory import predict
from foretrain.predict.plan import plan, timing
from foretrain.predict.spec import StepSpec

RANGE = "{ratio:.2f} ({lowest_ratio:.2f} to {highest_ratio:.2f})"


@part("published-groups")
def published_groups() -> str:
    template = "{group} | {runs} | {median_abs_error:.1p} | {median_error:+.1p} | {worst_abs_error:.0p} ({worst}) | {inside} ({share:.0%})"
    shown = [
        group
        for group in result("time_against_logs")["groups"]
        if group["group"] in ("all", "looked at", "only judged") or group["group"].startswith("…")
    ]
    return table(
        "published runs | runs > | median error > | signed > | largest (run) | inside the stated range >",
        (fill(template, group, share=group["inside"] / group["runs"]) for group in shown),
    )


@part("published-cards")
def published_cards() -> str:
    """Return a row for each kind of card that somebody published runs of, without doubtful runs."""
    cases: dict[str, list[dict]] = {}
    for case in result("time_against_logs")["cases"]:
        if not case["doubtful"]:
            cases.setdefault(case["gpu"], []).append(case)
    rows = []
    for gpu, found in sorted(cases.items(), key=lambda each: (-len(each[1]), each[0])):
        errors, inside = [case["error"] for case in found], sum(case["inside"] for case in found)
        largest = max(errors, key=abs)
        rows.append(f"{gpu} | {len(found)} | {median(map(abs, errors)):.1%} | {largest:+.1%} | {inside}")
    return table("card | runs > | median error > | largest > | inside the stated range >", rows)


@part("time")
def times() -> str:
    every, judged = (
        next(group for group in result("time_against_logs")["groups"] if group["group"] == name)
        for name in ("all", "only judged")
    )
    return fill(
        "Of {runs} published runs {inside} finished within the predicted range; the median error is {median_abs_error:.1p}, the largest "
        "{worst_abs_error:.0p}. Of the {n} that were never used to choose a rule, {held} are in the range, with a median error of {off:.1p}.",
        every, n=judged["runs"], held=judged["inside"], off=judged["median_abs_error"],
    )  # fmt: skip


declare(
    "calibrated", "step_time.cases",
    "config | dtype | mode | predicted > | measured > | error >",
    "{config} | {dtype} | {mode} | {predicted.expected_s:,.0ms} | {measured_s:,.0ms} | {error:+.1p}",
    "After `foretrain calibrate`, {configs} steps on a {machine.cpu}: median error {median_abs_error:.1p}, worst "
    "{worst_abs_error:.0p} (torch {versions.torch}, {date}; `python benchmarks/step_time.py`).",
)  # fmt: skip
declare(
    "kept-memory", "kept_memory.cases",
    "config | memory given back > | kept > | times as fast > | process's peak >",
    "{config} | {given_back_s:,.0ms} | {kept_s:,.0ms} | {faster:.2f} | × {peak:.2f}",
    peak=lambda row: row["kept_peak_bytes"] / row["given_back_peak_bytes"],
)  # fmt: skip
declare(
    "compile-start", "compile_start.rows", "compiled | first step s > | steady step ms >", "{compiled} | {first_s:.0f} | {step}",
    step=lambda row: f"{row['step_s'] * 1e3:.1f}",
)  # fmt: skip


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}"


def chosen_way(row: dict[str, Any]) -> str:
    kernels = f", attention {row['chosen']['attention']}" if row["chosen"] else ""
    masters = ", master weights" if row["chosen"].get("master_weights") else ""
    return f"{row['name']}, {mode(row)}, {row['dtype']}{kernels}{masters}"


@part("against-nanogpt")
def against() -> str:
    template = "{model} | {threads} | {way} | {ms} | {tokens_per_s:,.0f} | " + RANGE + (
        " | {loss_difference.mean:.3p}, {loss_difference.largest:.2p} in {loss_difference.steps} steps | {rounds}"
    )  # fmt: skip
    return table(
        "model | threads > | who | ms per step > | tokens/s > | times nanoGPT (range) > | loss differs, mean and most > | rounds >",
        (
            fill(
                template, row, model=model["model"], threads=model["threads"], way=chosen_way(row), ms=milliseconds(row["step_s"]),
                rounds=sum(each is not None for each in row["blocks_s"]),
            )
            for model in result("against_nanogpt")["models"] for row in model["contestants"] if "ratio" in row
        ),
    )  # fmt: skip


def made_on(found: dict[str, Any], date: str = "") -> str:
    flags = ", ".join(found["machine"]["flags"])
    return f"{found['machine']['device']} with {flags}; torch {found['versions']['torch']}; {date or found['date']}"


@part("speed-machine")
def speed_machine() -> str:
    return made_on(result("against_nanogpt")["models"][0])


@part("against-real-nanogpt")
def real() -> str:
    machines: dict[str, list[Any]] = {}
    for run in result("against_real_nanogpt")["runs"]:
        machines.setdefault(run["machine"]["device"], []).append(run)
    template = (
        "{run} steps | {foretrain.0.dtype} | {nanogpt_wall_s:.1f} | {foretrain_wall_s:.1f} ({low:.1f} to {high:.1f}) | {wall_ratio:.2f} | "
        "{first_start.wall_s:.1f} | {ms} | {step_ratio:.2f} | {foretrain_resident_bytes:,.0MB}, {nanogpt_resident_bytes:,.0MB}"
    )
    shown = []
    for own in machines.values():
        rows = []
        for run in own:
            walls = [row["wall_s"] for row in run["foretrain"]]
            rows.append(fill(template, run, low=min(walls), high=max(walls), ms=milliseconds(run["foretrain_step_s"])))
        dates = " and ".join(sorted({run["date"] for run in own}))
        columns = (
            "run | dtype | nanoGPT s > | foretrain s (range) > | times nanoGPT > | first start s > | ms per step > | times nanoGPT > | "
            "resident MB, nanoGPT's >"
        )
        shown.append(table(columns, rows, "", f"{made_on(own[0], dates)}."))
    return "\n\n".join(shown)


@part("hopper-forecasts")
def forecasts() -> str:
    """Return the errors of forecasts, for all timed steps on the card."""
    summary = result("gpu_h100_forecasts")["summary"]
    return (
        "On an H100, forecasts from the data sheet had a median error of {catalogue.median_error:.0%}, and {catalogue.within_range} steps were in the "
        "stated range; calibrated ones {calibrated.median_error:.0%}, and {calibrated.within_range}."
    ).format_map({key: SimpleNamespace(**value) for key, value in summary.items()})


Models = list[dict[str, Any]]


def contestants(model: dict[str, Any]) -> Models:
    return [row for row in model["contestants"] if "share" in row]


def percent(share: float) -> str:
    return f"{share * 100:.0f}%" if share >= 0.1 else f"{share * 100:.1f}%"


def who(row: dict[str, Any]) -> str:
    trained = ", as `foretrain train` runs it" if row.get("as_trained") else ""
    return f"{row['name']}, {mode(row)}, {row['dtype']}{trained}"


def machines() -> list[Models]:
    found: dict[str, Models] = {}
    for model in result("limit")["models"]:
        found.setdefault(model["machine"]["device"], []).append(model)
    return list(found.values())


def each_machine(name: str) -> Callable[[Callable[[Models], str]], None]:
    """Name the generated part with one table per machine."""

    def named(make: Callable[[Models], str]) -> None:
        part(name)(lambda: "\n\n".join(map(make, machines())) or "Not measured yet.")

    return named


@each_machine("limit-steps")
def steps(models: Models) -> str:
    """Return every contestant's speed over nanoGPT's, and its share of the limit."""
    return table(
        "model | who | ms per step > | times nanoGPT (range) > | limit ms > | share of the limit > | of the fastest dtype's >",
        (
            f"{model['model']} | {who(row)} | {milliseconds(row['step_s'])} | {fill(RANGE, row)} | {milliseconds(row['limit_s'])} | "
            f"{percent(row['share'])} | {percent(row['share_of_machine'])}"
            for model in models
            for row in contestants(model)
        ),
        "",
        f"{models[0]['machine']['device']}.",
    )


MODELS = {
    "124M": {}, "350M": {"n_layer": 24, "n_head": 16, "n_embd": 1024}, "1.5B": {"n_layer": 48, "n_head": 24, "n_embd": 1536},
    "8 blocks of width 4096": {"n_layer": 8, "n_head": 32, "n_embd": 4096},
}  # fmt: skip
MODES = (("fp8", "bfloat16"), ("int8", "bfloat16"), ("fp16_accumulation", "float16"))


@part("precision-losses")
def losses() -> str:
    runs = result("precision_modes")["runs"]
    plain = next(run["val_loss"] for run in runs if run["run"] == "bfloat16")
    rows = []
    for run in runs:
        cosines = (f"{run[key]['cosine']:.4f}" if run[key] else "" for key in ("agreement_before", "agreement_after"))
        rows.append(f"{run['run']} | {run['val_loss']:.4f} | {run['val_loss'] - plain:+.4f} | {' | '.join(cosines)}")
    return table("run | validation loss > | against bfloat16 > | cosine, first step > | cosine, last step >", rows)


def step_s(options: dict[str, int], card: str, matmul: str, dtype: str) -> float | None:
    values = {"batch_size": 8, "gradient_accumulation_steps": 40, **options, "matmul": matmul, "dtype": dtype}
    gpu = find(card)
    if matmul == "fp8" and gpu.capability < (8, 9):
        return None
    made = timing(StepSpec.of(RunConfig.model_validate(values), gpu))
    return made.step_s.expected_s if made else None


@part("precision-speeds")
def speeds() -> str:
    rows = []
    for name, options in MODELS.items():
        for card in ("RTX 3090", "RTX 4070", "RTX 4090"):
            pairs = ([step_s(options, card, matmul, dtype) for matmul in ("dtype", low)] for low, dtype in MODES)
            cells = (f"{plain / low:.2f} ×" if plain and low else "-" for plain, low in pairs)
            rows.append(f"{name} | {card} | {' | '.join(cells)}")
    return table(f"model | card | {' | '.join(f'`{low}` >' for low, _ in MODES)}", rows)


@part("precision-moments")
def moments() -> str:
    gpu, rows = find("RTX 4070"), []
    for options in list(MODELS.values())[:3]:
        sizes, times = [], []
        for optimizer in ("adamw", "adamw8bit"):
            config = RunConfig.model_validate({**options, "optimizer": optimizer})
            memory = predict(StepSpec.of(config, gpu, dtype="bfloat16", compiled=True))
            components = memory.phase("evaluate_steady").components
            sizes.append(f"{next(each.size_bytes for each in components if each.id == 'optimizer') / MIB:,.0f} MiB")
            made = plan(config, gpu).timing
            times.append(made.step_s.expected_s if made else 0.0)
        parameters = ModelShape.of(RunConfig.model_validate(options)).n_params
        rows.append(f"{parameters / 1e6:,.0f}M | {sizes[0]} | {sizes[1]} | {(times[1] - times[0]) * 1e3:,.0f} ms")
    return table("model | states, adamw > | states, adamw8bit > | step longer by >", rows)


@part("startup")
def startup() -> str:
    found = result("tool_speed")
    return (
        f"A new plan of GPT-2 124M takes {found['figures']['plan']['median_s']:.1f} s on a {found['machine']['cpu']}, and imports no torch. "
        "A fine-tuning run that does not fit takes seconds more, to look for changes."
    )


@part("watch-overhead")
def watch_overhead() -> str:
    found = result("watch_and_explain")
    wall = f"nothing can be said yet: the machine was shared, and the script alone varied by {found['spread_alone'] * 100:.0f}%"
    if found["spread_alone"] < 0.1:
        wall = (
            f"a script that computes on one core took {found['median_overhead'] * 100:+.1f}% longer watched than alone "
            f"(median of {len(found['pairs_s'])} pairs)"
        )
    return (
        f"One sample took {found['sample_s'] * 1e3:.2f} ms of processor time without a card, once a second, "
        f"{found['sample_s'] * 100:.2f}% of one core; in wall time {wall} "
        f"({found['machine']['cpu']}, {found['date']}; `python benchmarks/watch_and_explain.py`)."
    )


def dragging(name: str, end: str, **more: str) -> str:
    """Return answer times of the page while its sliders are dragged. `more`: further columns, by figure."""
    figures = {"median_s": "median", "p95_s": "95% within", "highest_s": "longest", **more}
    return table(
        f"sliders of | changes > | {' | '.join(f'{column} >' for column in figures.values())}",
        (
            f"{preset} | {row['answers']} | {' | '.join(f'{row[figure] * 1e3:,.0f} ms' for figure in figures)}"
            for preset, row in result(name)["dragging"].items()
        ),
        "", end,
    )  # fmt: skip


@part("page-speed")
def page_speed() -> str:
    end = (
        "A first visit loads {first_load_bytes:,.0kB} kB in all; the server takes {resident_bytes:,.0MiB}. (`python "
        "benchmarks/page_speed.py`, {machine.cpu}, {date}; from a change to the last byte of its answer, while the load of the "
        "machine was {load:.1f})"
    )
    return dragging("page_speed", fill(end, result("page_speed")), processor_s="processor time, mean")


@part("static-site")
def static_site() -> str:
    first, again = result("static_site")["visits"]
    end = (
        "A visit loads {load_bytes:.1MB} MB, {packed_bytes:.1MB} MB from a host that compresses. The form with its first answer is "
        "there after {first.first_picture_s:.1s}, Python after {first.python_ready_s:.1s} ({again.python_ready_s:.1s} on the second "
        "visit), its first own answer {own:.1s} later. (`python benchmarks/page_speed.py --static`, Chromium on {machine.cpu}, {date}; from a "
        "change until its answer is drawn, the host on the same machine, while its load was {load:.1f})"
    )
    own = first["first_answer_s"] - first["python_ready_s"]
    return dragging("static_site", fill(end, result("static_site"), first=first, again=again, own=own))


@part("tune-benchmark")
def tune() -> str:
    found = result("tune")
    cases = [case for case in found["cases"] if "best" in case]
    if not cases:
        return "Not measured to the end yet: `python benchmarks/tune.py` on an idle machine."
    clocks = {"cpu": "CPU time on one thread", "wall": "wall time"}
    end = "{machine.cpu}, torch {versions.torch}, {date}, {clock}; other programs used up to {busy:.0p} of the machine (`python benchmarks/tune.py`)."
    return table(
        "config | settings > | tried > | tune's pick | best of all | pick slower by > | as given slower by > | tune > | all >",
        ({**case, "half": f"{case['gap_half'] * 100:.1f}"} for case in cases),
        "{name} | {settings} | {trials} | {pick} | {best} | {gap:+.1p} ± {half} | {given_in_table:+.0p} | {tune_s:.0s} | {exhaustive_s:.0s}",
        fill(end, found, clock=" and ".join(sorted({clocks[case["clock"]] for case in cases})), busy=max(c["elsewhere"] for c in cases)),
    )  # fmt: skip
