"""The generated parts about training: recipes, techniques, prepared data, exports, faults."""

from statistics import mean
from typing import Any

from tables import declare, fill, part, result, table

from foretrain.base.units import format_bytes
from foretrain.config.options import OPTIONS
from foretrain.model.techniques import TECHNIQUES


def model_name(name: str) -> str:
    return name.replace("x", " × ")


declare(
    "time-to-loss", "time_to_loss.table",
    "model | recipe | steps | loss of each seed | mean | of nanoGPT's steps | of its wall time",
    "{model} | {run} | {steps:,} | {each} | {mean:.3f}{spread} | {steps_share:.1p} | {wall}",
    model=lambda row: model_name(row["model"]), each=lambda row: ", ".join(f"{loss:.3f}" for loss in row["losses"]),
    spread=lambda row: f" ± {row['sd']:.3f}" if "sd" in row else "",
    wall=lambda row: f"{row['wall_share'] * 100:.1f}%" if "wall_share" in row else "",
)  # fmt: skip


def reached(rows: list[dict[str, Any]], name: str, *, bpe: bool) -> dict[str, Any] | None:
    """Return the shortest modern run of a model at or below a recipe's loss with every common seed."""
    wanted = next((dict(zip(row["seeds"], row["losses"], strict=True)) for row in rows if row["run"] == name), {})
    found = []
    for row in rows:
        losses = {seed: loss for seed, loss in zip(row["seeds"], row["losses"], strict=True) if seed in wanted}
        low = losses and all(loss <= wanted[seed] for seed, loss in losses.items())
        if low and row["run"].startswith("modern") and bpe == ("BPE" in row["run"]):
            found.append({**row, "both": len(losses)})
    return min(found, key=lambda row: row["steps"], default=None)


@part("time-to-loss-sentence")
def sentence() -> str:
    words = []
    data = result("time_to_loss")["table"]
    for model in dict.fromkeys(row["model"] for row in data):
        rows = [row for row in data if row["model"] == model]
        for name, called, recipe in (
            ("nanogpt", "nanoGPT's recipe", "the modern recipe"),
            ("nanogpt tuned", "nanoGPT's recipe at its best rate", "the modern recipe"),
            ("nanogpt", "nanoGPT's recipe", "the modern recipe with a BPE of its corpus"),
        ):
            if row := reached(rows, name, bpe="BPE" in recipe):
                wall = f" and {row['wall_share'] * 100:.0f}% of its wall time" if "wall_share" in row else ""
                seeds = f"each of {row['both']} seeds" if row["both"] > 1 else "the one seed that both have"
                words.append(
                    f"At {model_name(model)} {recipe} is at or below the loss of {called} after "
                    f"{row['steps_share'] * 100:.1f}% of its steps{wall}, with {seeds}."
                )
    return "\n".join(words)


@part("time-to-loss-tokenizer")
def tokenizer() -> str:
    data, words = result("time_to_loss"), []
    walls = {(row["model"], row["run"]): row.get("wall_share") for row in data["table"]}
    bits: dict[tuple[str, str], dict[int, float]] = {}
    for run in data["runs"]:
        if run.get("bits_per_byte"):
            bits.setdefault((run["model"], run["run"]), {})[run["seed"]] = run["bits_per_byte"]
    for (model, name), own in bits.items():
        same = (model, name.removesuffix(", BPE of 1,024"))
        seeds = sorted(own.keys() & bits.get(same, {}).keys())
        if "BPE" not in name or not seeds:
            continue
        after, before = (mean(found[seed] for seed in seeds) for found in (own, bits[same]))
        longer, wall = walls[model, name], walls[same]
        time = f" in {longer / wall:.2f} times the time" if longer and wall else ""
        words.append(
            f"At {model_name(model)} a BPE of 1,024 tokens, trained on the corpus (`tokenizer = bpe`), ends at "
            f"{after:.3f} bits per byte instead of {before:.3f} after as many steps{time}; both over the whole validation "
            f"split, {'seed' if len(seeds) == 1 else 'mean of seeds'} {', '.join(map(str, seeds))}."
        )
    return "\n".join(words)


@part("time-to-loss-step")
def step_seconds() -> str:
    template = "{name} | {nanogpt:.0f} (float32) | {modern:.0f} ({modern_dtype}) | {ratio:.2f} ({lowest_ratio:.2f} to {highest_ratio:.2f}) | {threads}"
    return table(
        "model | nanoGPT, ms per step | modern, ms per step | ratio | threads",
        (
            fill(
                template,
                own,
                name=model_name(model),
                nanogpt=own["nanogpt_step_s"] * 1e3,
                modern=own["modern_step_s"] * 1e3,
            )
            for model, own in result("time_to_loss")["steps_s"].items()
        ),
    )


declare(
    "recipe-parts", "time_to_loss_parts.table", "recipe | seeds | loss | against all parts",
    "{part} | {each} | {loss:.3f} | {gain}",
    each=lambda row: ", ".join(map(str, row["seeds"])),
    gain=lambda row: "" if row["part"] == "all parts" else f"{row['more']:+.3f} ± {row['more_sd']:.3f}",
)  # fmt: skip


EXACTNESS = {
    "exact": "same maths; at most a different order of sums",
    "rounding": "same maths, different half-precision rounding",
    "other optimizer": "different updates",
}


@part("techniques")
def techniques() -> str:
    rows = []
    for t in TECHNIQUES:
        shown = {key: str(value).lower() if isinstance(value, bool) else value for key, value in t.options.items()}
        options = " ".join(f"`{key} = {value}`" for key, value in shown.items())
        rows.append(f"{t.id} | {options} | {t.saves} | {t.costs} | {EXACTNESS[t.exactness]} | {t.source}")
    return table("technique | how | saves | costs | learning | source", rows)


PREPARERS = {
    "bare": "the bare tokenizer, ids thrown away", "foretrain": "`foretrain prepare`", "nanogpt": "nanoGPT's way, re-enacted",
    "llm.c": "llm.c's and build-nanogpt's way, re-enacted", "datatrove": "datatrove's JsonlReader and DocumentTokenizer",
}  # fmt: skip


@part("prepare")
def prepare() -> str:
    """Return the median of each variant's quiet rounds and their range, each against the tokenizer's of the
    same round.
    """
    found, rows = result("prepare"), []
    for r in found["results"]:
        if r["tokens_per_s"] is None:
            rounds = [one for one in found["rounds"] if (one["size"], one["way"]) == (r["size"], r["way"])]
            speed, of = f"{max(one['tokens'] / one['wall_s'] for one in rounds):,.0f} ¹", "–"
        else:
            speed, (share, low, high) = f"{r['tokens_per_s'][0]:,.0f}", r["of_bare"]
            of = f"{share:.0%}" if low == high else f"{share:.0%} ({low:.0%} to {high:.0%})"
        rows.append(
            f"{r['size']} | {PREPARERS[r['way']]} | {r['rounds']} | {speed} | {of} | {format_bytes(r['peak_bytes'])}"
        )
    end = (
        "{machine.cpu}, {results.0.cores} tokenizing processes, a BPE of 50,257, {date} (`python benchmarks/prepare.py`). "
        "¹ The benchmark could not tell the way's own processes from other programs'."
    )
    return table(
        "source | way | rounds > | tokens/s > | of bare (range) > | peak of all processes >", rows, "", fill(end, found)
    )


@part("prepare-stream")
def stream() -> str:
    found = result("prepare_stream")
    shares = [row["outside"] for row in found["passes"]]
    end = (
        "Bytes as ids, on {machine.cpu}, {date} (`python benchmarks/prepare.py --stream byte`). Other programs had {low:.0%} "
        "to {high:.0%} of the cores. In log-log, processor seconds grow with a slope of {slopes.0.processor_s:.2f} (1 is linear), "
        "memory with one of {slopes.0.peak_bytes:.3f} (0 is constant)."
    )
    return table(
        "generated JSON lines | ids > | seconds > | processor seconds > | peak of all processes >",
        ({**row, "peak": format_bytes(row["peak_bytes"])} for row in found["passes"]),
        "{size} | {tokens:,} | {wall_s:,.0f} | {processor_s:,.0f} | {peak}",
        fill(end, found, low=min(shares), high=max(shares)),
    )


@part("llama-cpp")
def llama_cpp() -> str:
    found = result("gguf_in_llama_cpp")
    kinds, runs, rows = ("f32", "f16", "bf16", "q8_0", "Q4_K_M, of f16"), list(found["runs"].values()), []
    for name, run in found["runs"].items():
        apart = (f"{run['types'][kind]['largest_difference']:.2g}" for kind in kinds)
        rows.append(f"{name} | {run['logits_std']:.2f} | {' | '.join(apart)}")
    tanh = max(run["f32_with_tanh_gelu"]["largest_difference"] for run in runs if "f32_with_tanh_gelu" in run)
    same, texts = (sum(run[key] for run in runs) for key in ("greedy_tokens_the_same", "texts"))
    other = sum(len(run["texts_with_other_tokens"]) for run in runs)
    rules = ", ".join(f"`{name}` {len(wrong)}" for name, wrong in found["rules_with_other_tokens"].items())
    return "\n\n".join([
        "The largest difference between a logit of foretrain and the same one of llama.cpp, over three contexts of 128 tokens. The second\n"
        "column is the standard deviation of the logits.",
        table(f"model | deviation > | {' | '.join(f'{kind} >' for kind in kinds)}", rows),
        f"With the tanh formula in foretrain as well, the f32 files of GPT-2 differ by {tanh:.2g} at most. From f32 files, {same} of the {len(runs)} models\n"
        f"generate the same 64 most probable tokens. Of {texts} texts that these models' tokenizers encoded, {other} had other tokens in llama.cpp.\n"
        f"Of {runs[0]['texts']} texts for each rule and kind of vocabulary alone: {rules}.\n"
        f"(`python benchmarks/gguf_in_llama_cpp.py`, llama-cpp-python {found['packages']['llama_cpp_python']}, {found['date']})",
    ])  # fmt: skip


# Name in tests/faults/: (action, the counts of what had to hold, with the count of all).
FAULTS = {
    "kills": ("`kill -9` at a random time or inside a save; each run is resumed until it is done", "runs"),
    "every_call": ("`kill -9` before each call on files that the saves of a run make", "calls"),
    "sigterm": ("SIGTERM at a random moment", "signals"),
    "supervised": (
        "under `--auto-restart`: the training process is killed, then the supervisor is told to stop, then it is killed; "
        "each later process finds other threads and nothing measured", "runs",
    ),
    "killed_ranks": (
        "`kill -9` of one of 2, 3 or 4 ranks or of all at once, at a random time or before a call on a file; they start "
        "again until they are done", "runs",
    ),
    "stopped_ranks": (
        "SIGTERM to one of 2 or 3 ranks or to all at once, at a random moment of a whole run; they start again until they "
        "are done", "signals",
    ),
    "full_disk": ("the disk is full after each 64 KiB of a save", "offsets"),
    "bit_flips": ("one bit of a checkpoint is flipped", "flips"),
    "not_finite": ("NaN or infinity in a weight, an activation, a gradient or the loss", "places"),
    "out_of_memory": ("out of memory in a forward or backward pass, an evaluation, the optimizer", "points"),
    "fuzzed_configs": ("a config or `--key=value` that is wrong, absurd or torn, at random", "configs"),
    "hostile_configs": ("a config that wants to run a program, read a file, or take memory and time", "configs"),
    "hostile_payloads": ("a checkpoint, dataset, log, export, snapshot or cache that wants the same", "payloads"),
    "data_flips": ("one bit, or the end, of a prepared shard, its index, tokenizer or unfinished state", "damages"),
}  # fmt: skip
SHOWN = {
    "in_a_save": "kills inside a save", "kills": "kills", "equal": "bit for bit the run without a fault",
    "unreadable": "unreadable checkpoints", "exit_75": "exit code 75", "durable": "state saved",
    "as_documented": "ended each time as documented",
    "slowest_s": "s, the slowest", "intact": "earlier checkpoint intact", "said": "message with need and room",
    "found": "found before use", "as_the_smaller": "bit for bit the run at the smaller micro-batch",
    "clean_stop": "stopped with exit code 5, nothing half-updated saved", "refused": "refused with a sentence",
    "accepted": "right after all, and run or planned as written", "tracebacks": "tracebacks", "hangs": "hangs",
    "silent": "accepted or changed in silence", "not_quantities": "forecasts that are no quantities",
    "executed": "run", "held": "ended in a sentence or an answer, in time and memory", "most_mib": "MiB more, the most",
    "kinds": "kinds of file", "no_effect": "without any effect", "missed": "missed",
}  # fmt: skip


@part("faults")
def faults() -> str:
    rows, held = [], []
    for found in (result("faults"), result("fault_inputs")):
        for name, counts in found["experiments"].items():
            what, unit = FAULTS[name]
            came = (
                f"{counts[key]:,.1f} {text}" if isinstance(counts[key], float) else f"{counts[key]:,} {text}"
                for key, text in SHOWN.items() if key in counts
            )  # fmt: skip
            nothing = "nothing changed, nothing bad saved, exit code 6, the tensor named"
            rows.append(f"{what} | {counts[unit]:,} {unit} | {', '.join(came) or nothing}")
        held.append(fill(
            "{held} (tier {tier}, seed {seed}, {date}, {machine.cpu}, torch {versions.torch}; `make {target}`).", found,
            held="All held" if found["ok"] else "**Not all held**",
            target="faults-long" if found["tier"] == "nightly" else "faults",
        ))  # fmt: skip
    return table("fault | how often > | result", rows, "", "\n".join(dict.fromkeys(held)))


@part("checkpoint-cost")
def checkpoint_cost() -> str:
    found = result("checkpoint_cost")
    columns = (
        "model | checkpoint > | step > | the loop writes itself > | in the background: blocked > | overlapping steps take longer by > | "
        f"share of {found['interval_steps']:,} steps: blocked > | with that >"
    )
    template = (
        "{case} | {checkpoint_bytes:,.1MiB} | {step_s:,.0ms} | {loop_s:,.0ms} | {background_s:,.1ms} | {beside_s:,.0ms} | "
        "{blocked_share:.4p} | {whole_share:.3p}"
    )
    end = "({threads} threads on {machine.cpu}, {date}; `python benchmarks/checkpoint_cost.py`. Not yet measured on a GPU.)"
    return table(columns, found["cases"], template, fill(end, found))


KINDS = {
    "kill": "`kill -9`", "kill_in_a_save": "`kill -9` inside a save", "segmentation_fault": "segmentation fault",
    "flip_and_kill": "a flipped bit in the newest checkpoint and `kill -9`", "stop_and_go_on": "stopped for seconds",
    "full_disk": "full disk", "no_descriptors": "no file can be opened", "read_only": "read-only folder",
    "slow_disk": "slow disk", "no_memory": "out of memory",
}  # fmt: skip


@part("soak")
def soak() -> str:
    found = result("soak")
    grown = {
        name: fill(
            "{resident_bytes_per_h:+.2MB} MB an hour over {lived_h:.2f} h, open files {open_files:.0f}, {open_files_grown:+.0f}", each
        ) if each else "not old enough to say"
        for name, each in found["grown"].items()
    }  # fmt: skip
    compared = "not compared yet"
    if same := found["compared"]:
        equal = "bit for bit the same" if same["weights_moments_generators_equal"] else "**not the same**"
        compared = fill(
            "weights, moments and generators {equal}; losses of {losses_equal:,} of {steps:,} steps the same",
            same,
            equal=equal,
        )
    kinds = ", ".join(f"{found['kinds'][name]} x {text}" for name, text in KINDS.items() if name in found["kinds"])
    rows = {
        "faults": "{faults} in {hours:.2f} h, one each {every_s:.0s}: {each_kind}",
        "faults that could not be injected": ", ".join(each["kind"] for each in found["not_done"]) or "none",
        "done by hand": "{manual_actions}",
        "training processes": "{processes}",
        "useful share of the time in which it could work": "{goodput:.1%}",
        "useful share of all time": "{useful_share_of_wall:.1%}",
        "restarts": "{restart_s:.0s} of {wall_s:.0s}",
        "steps done again": "{repeated_steps:,}, for {steps:,} that count",
        "memory of the training process": grown["child"],
        "memory of the supervisor": grown["supervisor"],
        "against the run without faults": compared,
    }
    held = "All held" if found["ok"] else "**Not all held**"
    if found["exit_code"] is None:
        held = "Under way: no result yet"
    end = "{held} ({date}, {machine.cpu}, shared with other work, torch {versions.torch}; `make soak`)."
    shown = (f"{what} | {fill(count, found, each_kind=kinds)}" for what, count in rows.items())
    return table("what | count", shown, "", fill(end, found, held=held))


@part("resume-keys")
def resume() -> str:
    """Return every option under what another value of it does on resume."""
    kinds = {
        "free": "free | nothing that is learned or measured hangs on it",
        "rounding": "warns | the same training, but sums may round differently: no longer bit for bit",
        "evaluation": "warns | training is not moved, but later evaluations do not compare with earlier ones",
        "refuses": "refuses | it decides what is learned; start a new run",
    }
    names = {kind: ", ".join(f"`{each.name}`" for each in OPTIONS.values() if each.on_resume == kind) for kind in kinds}
    return table("changed on resume | why | options", (f"{why} | {names[kind]}" for kind, why in kinds.items()))
