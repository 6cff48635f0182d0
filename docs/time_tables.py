"""The generated parts about time: published runs, calibrated and measured steps, an H100, the machine's limit, the tools."""

from collections.abc import Callable
from typing import Any

from tables import GIB, MIB, declare, fill, mode, part, result, table

from foretrain.config.options import RunConfig
from foretrain.config.shape import ModelShape
from foretrain.hardware.catalogue import find
from foretrain.predict.memory import predict
from foretrain.predict.plan import plan, timing
from foretrain.predict.spec import StepSpec

RANGE = "{ratio:.2f} ({lowest_ratio:.2f} to {highest_ratio:.2f})"


def groups(*starts: str, head: str = "published runs", signed: bool = True) -> str:
    """Return errors and ranges of the groups whose name begins so."""
    template = (
        "{name} | {runs} | {median_abs_error:.1p} | {signed}{worst_abs_error:.0p} ({worst}) | {inside} ({share:.0%})"
    )
    return table(
        f"{head} | runs > | median error > | {'signed > | ' if signed else ''}largest (run) | {'inside the stated' if signed else 'in the'} range >",
        (
            fill(
                template, group, name=group["group"].removeprefix("by " * signed), share=group["inside"] / group["runs"],
                signed=f"{group['median_error'] * 100:+.1f}% | " if signed else "",
            )
            for group in result("time_against_logs")["groups"]
            if group["group"].startswith(starts or "")
        ),
    )  # fmt: skip


@part("published-groups")
@part("time")
def published_groups() -> str:
    return groups("all", "looked at", "only judged", "nano", "…")


@part("gpu-times")
def every_group() -> str:
    return groups(head="published times", signed=False)


@part("published-by")
def by_origin() -> str:
    """Return one line for each source of runs; those used to find rules are marked."""
    looked_at = ", ".join(result("time_against_logs")["looked_at"])
    return f"{groups('by ', head='source')}\n\nLooked at when a rule is found: {looked_at}. All other sources are only judged."


declare(
    "published", "time_against_logs.cases",
    "run | card | torch | whose step | mode | logged tokens/s > | predicted step time > | in the range",
    "{id}{mark} | {gpu} | {torch} | {whose} | {mode} | {tokens_per_s:,.0f} | {error:+.0p} | {within}",
    mark=lambda row: " ?" if row["doubtful"] else " *" if row["origin"] in result("time_against_logs")["looked_at"] else "",
    whose=lambda row: {"nanogpt": "nanoGPT's", "pytorch": "other PyTorch", "other": "other software"}[row["kind"]],
    mode=mode, within=lambda row: "yes" if row["inside"] else "no",
)  # fmt: skip


@part("published-not")
def not_predicted() -> str:
    return "\n".join(f"- {line}." for line in result("time_against_logs")["left_out"])


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
        "model | threads > | who | ms a step > | tokens/s > | times nanoGPT (range) > | loss differs, mean and most > | rounds >",
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
            "run | dtype | nanoGPT s > | foretrain s (range) > | times nanoGPT > | first start s > | ms a step > | times nanoGPT > | "
            "resident MB, nanoGPT's >"
        )
        shown.append(table(columns, rows, "", f"{made_on(own[0], dates)}."))
    return "\n\n".join(shown)


@part("hopper-ways")
def ways() -> str:
    shares = {row["title"]: row["share"] for card in result("limit")["cards"] for row in card["rows"] if "share" in row}
    rows = []
    for row in result("gpu_h100_ways")["rows"]:
        if row.get("blocks"):
            busy_s = (row.get("profile") or {}).get("busy_s")
            busy = f"{busy_s / row['step_s']:.0%}" if busy_s else "–"
            times = (
                f"{row['ratio']:.2f} ({row['ratio_range'][0]:.2f} to {row['ratio_range'][1]:.2f})"
                if "ratio" in row
                else "–"
            )
            share = f"{shares[row['title']] * 100:.0f}%" if row["title"] in shares else "not measured"
            rows.append(
                f"{row['title']} | {milliseconds(row['step_s'])} | {row['tokens_per_s']:,.0f} | {times} | {share} | "
                f"{busy} | {row['allocated_bytes'] / GIB:.2f} | {row['reserved_bytes'] / GIB:.2f}"
            )
    return table(
        "model and way | ms a step > | tokens/s > | times nanoGPT (range) > | share of the limit > | kernels ran > | allocated GiB > | reserved GiB >",
        rows,
    )


SIDES = {
    "nanogpt": "nanoGPT's train.py", "foretrain": "foretrain, `cuda_graph`", "no graph": "foretrain",
    "masters": "foretrain, `master_weights`",
}  # fmt: skip


@part("hopper-runs")
def whole_runs() -> str:
    rows = []
    for run in result("gpu_h100_real")["runs"]:
        rival = run["nanogpt"][0]["step_s"]
        for side in run["ways"]:
            for row in run[side]:
                held = f"{max(p['reserved_bytes'] for p in row['phases']) / GIB:.2f}" if row.get("phases") else "–"
                rows.append(
                    f"{run['run']}, {run['steps']} steps | {SIDES[side]} | {row['wall_s']:.1f} | {row['step_s'] * 1e3:.1f} | "
                    f"{rival / row['step_s']:.2f} | {row['resident_bytes'] / 1e6:,.0f} | {held}"
                )
    return table(
        "run | program | wall s > | ms a step > | times nanoGPT (step) > | resident MB > | reserved GiB >", rows
    )


def errors(row: dict[str, Any], *kinds: str) -> str:
    return " | ".join(f"{row[f'{kind}_error'] * 100:+.1f}%" if f"{kind}_error" in row else "–" for kind in kinds)


@part("hopper-forecasts")
def forecasts() -> str:
    """Return the errors of forecasts, for all timed steps on the card, the largest first."""
    found = result("gpu_h100_forecasts")
    words = [
        f"by the {by}, the median error is {said['median_error'] * 100:.0f}%, and {said['within_range']} steps lie within the range"
        for by, said in (("catalogue", found["summary"]["catalogue"]), ("calibration", found["summary"]["calibrated"]))
    ]
    rows = sorted(found["rows"], key=lambda row: -abs(row["calibrated_error"]))
    return table(
        "step | measured ms > | catalogue > | calibrated >",
        (f"{row['title']} | {milliseconds(row['measured_s'])} | {errors(row, 'catalogue', 'calibrated')}" for row in rows),
        "", f"{'; '.join(words).capitalize()}.",
    )  # fmt: skip


declare(
    "hopper-times", "gpu_h100_speed.rows",
    "run | mode | dtype | measured ms > | catalogue > | calibrated > | energy >", "{name} | {mode} | {dtype} | {ms} | {errors}",
    only=lambda row: "step_s" in row["measured"], mode=mode, ms=lambda row: milliseconds(row["measured"]["step_s"]),
    errors=lambda row: errors(row, "catalogue", "calibrated", "energy"),
)  # fmt: skip
KERNELS = {
    "matmuls (cuBLAS)": ("nvjet", "splitKreduce"), "attention (cuDNN)": ("cudnn", "flash"), "softmax and loss": ("softmax", "nll"),
    "norms, with what is fused into them": ("norm",), "GELU": ("gelu",), "AdamW and clipping": ("multi_tensor", "adam", "Adam"),
    "casts, sums of gradients, copies": ("",),
}  # fmt: skip


@part("hopper-kernels")
def kernels() -> str:
    rows = {row["name"]: row for row in result("gpu_h100_ways")["rows"] if row["model"] == "124M" and row["compiled"]}
    sides = [rows["nanoGPT"], rows["master weights"]]
    spent: dict[str, list[float]] = {}
    for i, side in enumerate(sides):
        for name, _, seconds in side["profile"]["kernels"]:
            group = next(group for group, words in KERNELS.items() if any(word in name for word in words))
            spent.setdefault(group, [0.0, 0.0])[i] += seconds * 1e3
    whole, busy = (
        [each * 1e3 for each in times]
        for times in ([s["step_s"] for s in sides], [s["profile"]["busy_s"] for s in sides])
    )
    shown = sorted(spent.items(), key=lambda item: -item[1][0])
    shown += [("no kernel ran", [a - b for a, b in zip(whole, busy, strict=True)]), ("the step", whole)]
    return table(
        "kernels | nanoGPT, ms a step > | foretrain, master weights >",
        (f"{name} | {a:.1f} | {b:.1f}" for name, (a, b) in shown),
    )


GROUPS = {
    "forward": "matmuls, forward", "input_gradient": "matmuls, gradients of inputs",
    "weight_gradient": "matmuls, gradients of weights", "attention": "attention",
    "pointwise": "norms, activations, casts", "loss": "loss", "optimizer": "clipping, optimizer",
}  # fmt: skip
REST = "launching, Python, the autograd engine"
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


@each_machine("limit-peaks")
def peaks(models: Models) -> str:
    """Return the best peaks over all models' measurements, which were minutes apart."""
    each = [one["peaks"] for one in models]
    best: dict[tuple[str, str], float] = {}
    for product in (product for one in each for product in one["products"]):
        key = product["dtype"], product["kind"]
        best[key] = max(best.get(key, 0.0), product["flop_per_s"])
    kinds = {
        "matmul": "forward", "matmul_input": "gradient of the input", "matmul_weight": "gradient of the weight",
        "attention": "batched, as attention has it",
    }  # fmt: skip
    dtypes = dict.fromkeys(dtype for dtype, _ in best)
    rows = [f"matmul, {dtype}, {kinds[k]} | {best[dtype, k] / 1e9:,.0f} GFLOP/s" for dtype in dtypes for k in kinds]
    rates = [rate for one in each for rate in one["bandwidths"]]
    largest = max(rate["moved_bytes"] for rate in rates)
    for access, name in (("copy", "copying"), ("in_place", "in place")):
        own = [rate for rate in rates if rate["access"] == access]
        memory = max(rate["bytes_per_s"] for rate in own if rate["moved_bytes"] == largest)
        cache = max(own, key=lambda rate: rate["bytes_per_s"])
        rows += [f"memory, {name} | {memory / 1e9:,.0f} GB/s"]
        rows += [f"cache, {name} ({cache['moved_bytes'] / MIB:,.0f} MiB) | {cache['bytes_per_s'] / 1e9:,.0f} GB/s"]
    rows += [
        f"a fresh page of {each[0]['page_bytes']:,} bytes | {min(one['page_s'] for one in each) * 1e9:,.0f} ns",
        f"the smallest operation | {min(one['launch_s'] for one in each) * 1e6:.1f} µs",
        f"the same with its gradient | {min(one['autograd_launch_s'] for one in each) * 1e6:.1f} µs",
    ]
    took_s = max(one["took_s"] for one in each) / 2
    return table("what | peak >", rows, "", f"{made_on(models[0])}; measured in {took_s:.0f} s.")


@each_machine("limit-steps")
def steps(models: Models) -> str:
    """Return every contestant's speed over nanoGPT's, and its share of the limit."""
    return table(
        "model | who | ms a step > | times nanoGPT (range) > | limit ms > | share of the limit > | of the fastest dtype's >",
        (
            f"{model['model']} | {who(row)} | {milliseconds(row['step_s'])} | {fill(RANGE, row)} | {milliseconds(row['limit_s'])} | "
            f"{percent(row['share'])} | {percent(row['share_of_machine'])}"
            for model in models
            for row in contestants(model)
        ),
        "",
        f"{models[0]['machine']['device']}.",
    )


def fastest(model: dict[str, Any]) -> Models:
    """Return nanoGPT's faster step, and foretrain's faster."""
    own = ([row for row in contestants(model) if row["name"] == name] for name in ("nanoGPT", "foretrain"))
    return [min(rows, key=lambda row: row["step_s"]) for rows in own if rows]


@each_machine("limit-operations")
def operations(models: Models) -> str:
    """Return each group measured, and at the limit."""
    sides = [(model, row) for model in models for row in fastest(model)]
    rows = []
    for group, name in GROUPS.items():
        found = [next(each for each in row["groups"] if each["group"] == group) for _, row in sides]
        cells = (f"{each['measured_s'] * 1e3:,.2f} ({each['limit_s'] * 1e3:,.2f})" for each in found)
        rows.append(f"{name} | {' | '.join(cells)}")
    rest = (f"{row['rest_s'] * 1e3:,.2f}" for _, row in sides)
    whole = (f"{milliseconds(row['step_s'])} ({milliseconds(row['limit_s'])})" for _, row in sides)
    rows += [f"{REST} | {' | '.join(rest)}", f"a step | {' | '.join(whole)}"]
    quicker = [
        f"{model['model']}, {who(row)}: {', '.join(GROUPS[group] for group in row['quicker_than_limit'])}"
        for model in models
        for row in contestants(model)
        if row["quicker_than_limit"]
    ]
    told = "No group of operations was quicker than its limit."
    if quicker:  # a peak was badly measured
        told = f"Quicker than their limit, so that a peak was measured too low: {'; '.join(quicker)}."
    heads = "".join(f" | {model['model']}, {row['name']} {row['dtype']} >" for model, row in sides)
    return table(f"ms: measured (limit){heads}", rows, "", f"{models[0]['machine']['device']}. {told}")


@part("limit-cards")
def cards() -> str:
    rows = []
    for row in (row for card in result("limit")["cards"] for row in card["rows"]):
        ratio = f"{row['ratio']:.2f}" if row["ratio"] else "not measured"
        limit = (
            f"{milliseconds(row['limit_s'])} | {percent(row['share'])}"
            if "share" in row
            else "not measured | not measured"
        )
        rows.append(
            f"{row['title']} | {mode(row)} | {row['dtype']} | {milliseconds(row['step_s'])} | {ratio} | {limit}"
        )
    return table("run | mode | dtype | ms a step > | times nanoGPT > | limit ms > | share of the limit >", rows)


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


def seconds(value: float) -> str:
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"


@part("tool-speed")
def tool_speed() -> str:
    """Return the targets of the tools, and their times where the machine was quiet."""
    found = result("tool_speed")
    return table(
        "| asked > | median > | range | runs > | reached",
        (
            f"{row['name']} | {seconds(row['asked_s'])} | {seconds(row['median_s'])} | {seconds(row['low_s'])} to {seconds(row['high_s'])} | "
            f"{row['runs']} | {'yes' if row['median_s'] <= row['asked_s'] else 'no'}"
            for row in found["figures"].values()
            if row["others_share"] <= 0.1
        ),
        "", fill("{machine.cpu}, torch {versions.torch}, {date} (`python benchmarks/tool_speed.py`).", found),
    )  # fmt: skip


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


@part("tune-console")
def tune_console() -> str:
    shown = result("tune")["cases"][0]["console"].rstrip().splitlines()
    return "\n".join(["```", *(line.rstrip() for line in shown), "```"])
