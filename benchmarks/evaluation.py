"""`foretrain eval` against others: bits per byte against transformers' loss, lm-eval on an export against lm-eval on the
folder and on the run's own model.

Trains a tiny model of each family on docs/*.md, then scores README.md and two tasks made of its lines. Needs the extras
hf and eval, and no network: python benchmarks/evaluation.py
"""

import json
import math
import os
import random
import tempfile
from contextlib import chdir
from pathlib import Path
from typing import Any

import torch
from common import arguments, report

import foretrain
from foretrain.runs.scores import Evaluation

os.environ["HF_HUB_OFFLINE"] = "1"
TEXT = Path(__file__).parents[1] / "README.md"
RECIPES = ("nanogpt", "llama", "nanochat", "modern")
SHAPE = {
    "dataset": "data/docs", "vocab_size": 1024, "n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": 64,
    "batch_size": 8, "gradient_accumulation_steps": 1, "max_iters": 100, "lr_decay_iters": 100, "warmup_iters": 10,
    "eval_interval": 50, "eval_iters": 2, "device": "cpu", "compile": False,
}  # fmt: skip
QUESTIONS, CHOICES, STRIDE = 60, 4, 32
TASKS = ("next_line", "whole_lines")


def write_tasks(folder: Path) -> None:
    """Which of four lines follows a line of README.md, and how likely each pair of lines is."""
    drawn = random.Random(1)
    lines = [line[:80] for line in TEXT.read_text("utf-8").splitlines() if line.strip()]
    data = folder / "questions.json"
    with data.open("w", encoding="utf-8") as file:
        for _ in range(QUESTIONS):
            place = drawn.randrange(len(lines) - 1)
            right = drawn.randrange(CHOICES)
            choices = [f"\n{lines[place + 1] if i == right else drawn.choice(lines)}" for i in range(CHOICES)]
            file.write(json.dumps({"line": lines[place], "choices": choices, "answer": right}) + "\n")
    head = f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {data}\ntest_split: test\nnum_fewshot: 0\nmetadata:\n  version: 1.0\n"
    (folder / "next_line.yaml").write_text(
        f'task: next_line\n{head}output_type: multiple_choice\ndoc_to_text: "{{{{line}}}}"\ndoc_to_target: answer\n'
        'doc_to_choice: "{{choices}}"\nmetric_list:\n  - metric: acc\n  - metric: acc_norm\n'
    )
    (folder / "whole_lines.yaml").write_text(
        f'task: whole_lines\n{head}output_type: loglikelihood_rolling\ndoc_to_text: ""\n'
        'doc_to_target: "{{line}}{{choices[answer]}}"\nmetric_list:\n  - metric: bits_per_byte\n'
    )


def bits_of_transformers(folder: str, text: str, context: int) -> float:
    """Bits per byte by transformers' model and tokenizer, in the overlapping windows of its documentation."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = [tokenizer.bos_token_id, *tokenizer(text)["input_ids"]]
    nats, done, begin = 0.0, 0, 0
    while done < len(ids) - 1:
        end = min(begin + context, len(ids) - 1)
        labels = torch.tensor([ids[begin + 1 : end + 1]])
        labels[:, : done - begin] = -100
        with torch.no_grad():
            logits = model(torch.tensor([ids[begin:end]])).logits
        loss = torch.nn.functional.cross_entropy(logits[0].double(), labels[0], reduction="sum", ignore_index=-100)
        nats += float(loss)
        done, begin = end, begin + STRIDE
    return nats / math.log(2) / len(text.encode())


def by_metric(found: Evaluation) -> dict[str, float]:
    """{task and metric: value}."""
    return {f"{score.task} {score.metric}": score.value for score in found.tasks}


def row_of(recipe: str, tasks: Path) -> dict[str, Any]:
    """What each of the ways says of one family's run."""
    foretrain.train({"recipe": recipe, **SHAPE, "out_dir": recipe})
    found = foretrain.evaluate(
        recipe, text=TEXT, tasks=TASKS, include_path=tasks, stride=STRIDE, device="cpu"
    )  # fmt: skip
    row: dict[str, Any] = {
        "recipe": recipe, "bits_per_byte": found.texts[0].bits_per_byte,
        "standard_error": found.texts[0].standard_error, "tokens": found.texts[0].tokens, "through": found.tasks[0].through,
        "tasks": by_metric(found),
    }  # fmt: skip
    if recipe != "modern":  # which Hugging Face has no layout for
        folder = foretrain.export(recipe, "hf").path
        row["transformers_bits_per_byte"] = bits_of_transformers(folder, TEXT.read_text("utf-8"), SHAPE["block_size"])
        row["folder_tasks"] = by_metric(foretrain.evaluate(folder, tasks=TASKS, include_path=tasks, device="cpu"))
    return row


def apart(row: dict[str, Any]) -> tuple[float | None, float | None]:
    """(how far bits per byte are from transformers', the most that any metric differs between ways), as shares."""
    if "transformers_bits_per_byte" not in row:
        return None, None
    bits = abs(row["bits_per_byte"] / row["transformers_bits_per_byte"] - 1)
    other = row["folder_tasks"]
    return bits, max(abs(other[name] / value - 1) for name, value in row["tasks"].items() if value)


def main() -> None:
    """Train, score, compare."""
    out = arguments("evaluation", "bits per byte and tasks against transformers and lm-eval").out.absolute()
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        tasks = Path(folder, "tasks")
        tasks.mkdir()
        write_tasks(tasks)
        pages = sorted((TEXT.parent / "docs").glob("*.md"))
        Path("docs.txt").write_text("\n".join(page.read_text("utf-8") for page in pages), "utf-8")
        foretrain.prepare("docs.txt", "data/docs", train_bpe=SHAPE["vocab_size"], workers=1)
        rows = [row_of(recipe, tasks) for recipe in RECIPES]
    for row in rows:
        row["bits_apart"], row["tasks_apart"] = apart(row)
    report(out, {"shape": SHAPE, "stride": STRIDE, "rows": rows})


if __name__ == "__main__":
    main()
