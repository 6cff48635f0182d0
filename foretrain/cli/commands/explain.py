"""`foretrain explain`: what a run, a training log or a memory snapshot says, and what it hides."""

import sys

from foretrain.analysis.run import RunExplanation
from foretrain.app.explain import SCHEMAS, explain
from foretrain.base.messages import say
from foretrain.cli.command import OF_CONFIG, argument, command, flag, json_option, option
from foretrain.cli.common import ERR, noted, print_answer, working
from foretrain.reports.views import document_of

EPILOG = """Examples:
foretrain explain out-baby              (a run, or a watched run)
foretrain explain out-baby --limit      (how near the machine's limit, operation by operation)
foretrain explain snapshot.pickle       (torch.cuda.memory._dump_snapshot of any program; read as data, never run)
foretrain explain train.log
foretrain explain train.log --config config/train_gpt2.py --gpu "RTX 4070"
foretrain explain train.log --config my.py --batch_size=8 --json
ssh box cat out/train.log | foretrain explain - --config my.py --gpu 4090
foretrain explain out-qwen/foretrain
foretrain explain wandb/offline-run-20261127_153104-wj13is4z   (what a tracker keeps)"""


@command("explain", EPILOG, **OF_CONFIG)
@argument(
    "log RUN|SNAPSHOT|LOG",
    "A run directory, one of ForetrainCallback, a PyTorch memory snapshot, a run of wandb, TensorBoard, "
    "trackio, or the log of a trainer (nanoGPT, Hugging Face Trainer, TRL, axolotl, torchtitan, llm.c "
    "and others); - reads a log from stdin.",
)
@argument("words [--KEY=VALUE]...", "Options that override --config, as in plan.", nargs=-1)
@option("--config CONFIG", "Config of the run: a preset, TOML or nanoGPT config/*.py.", multiple=True)
@option("--gpu", "Card of the run; auto: the one the log names, or this machine's.", default="auto")
@flag("--limit", "Of a run: what this machine could do, operation by operation.")
@json_option
def explain_command(log: str, words: list[str], config: list[str], gpu: str, limit: bool, as_json: bool) -> None:
    """Explain a run, a log or a memory snapshot: where memory and time went, why it ran out, what to change."""
    with working(say("working.explaining", path=log)) as show:
        found = explain(
            sys.stdin.buffer if log == "-" else log, [*config, *words] or None, gpu,
            tell=lambda note: ERR.print(noted(note), soft_wrap=True), listen=lambda what: show(say(f"working.{what}")),
        )  # fmt: skip
    options = {"limit": limit} if isinstance(found, RunExplanation) else {}
    print_answer(found, SCHEMAS[type(found)], lambda: document_of(found, **options), as_json=as_json)
