"""`foretrain compare`: runs, plans, logs and trackers' exports side by side; one run: its forecast too."""

from functools import partial

from foretrain.analysis import forecast_check
from foretrain.analysis.forecast_check import ForecastCheck
from foretrain.app.compare import compare
from foretrain.base.errors import UserError
from foretrain.cli.command import argument, command, json_option, option
from foretrain.cli.common import print_answer, print_notes
from foretrain.comparison.compare import SCHEMA
from foretrain.hardware.catalogue import stated_bytes
from foretrain.reports.views import compare as compare_view
from foretrain.reports.views import run as run_view
from foretrain.runs.columns import NAMES

EPILOG = """Examples:
foretrain compare out-baby   (one run: its forecast against what it measured)
foretrain compare out-a out-b
foretrain compare b1.log+b1.py b2.log+b2.py --gpu "RTX 4070"   (logs, each with the config of its run)
foretrain compare mine=out theirs=runs/Nov27_12-00-00_host   (what TensorBoard, wandb, trackio keep)
foretrain compare before=out-a after=plan.json faster=my.toml+batch_size=8 --gpu 4070
foretrain compare a.csv+my.toml b.csv+my.toml+learning_rate=1e-3 --column train_loss=my/loss --json
foretrain compare home=my.toml+gpu=4070 cloud=my.toml+gpu=A100-SXM4-80GB --price "A100-SXM4-80GB=1.2" """


@command("compare", EPILOG)
@argument(
    "sources [NAME=]SOURCE...",
    "A run directory, a plan (JSON), a config or preset, the log of a trainer (nanoGPT, Hugging Face "
    "Trainer, TRL, axolotl, torchtitan, llm.c and others), a run of wandb, TensorBoard or trackio, or an "
    "export of theirs (CSV, JSON). After a +: the config of the run, options such as batch_size=8, and "
    "gpu=, used_by_others=, tokens_per_step=, bytes_per_token=, run=.",
    nargs=-1,
    required=True,
)
@option("--gpu", "Card for logs, exports and configs; auto: the one the log names, or this machine's.", default="auto")
@option("--used-by-others", "Memory used by other programs on the card, such as 2GB.", name="others", default="")
@option("--price PRICE", "Rent per hour, such as 0.35/h, or per card: '4090=0.35,A100=1.2'.")
@option(
    "--column ROLE=NAME",
    "Name of a column in an export: train_loss=my/loss; also step, val_loss, val_bpb, step_s, step_ms, "
    "tokens, tokens_per_s, seconds, timestamp.",
    multiple=True,
)
@json_option
def compare_command(
    sources: list[str], gpu: str, others: str, price: str | None, column: list[str], as_json: bool
) -> None:
    """Compare runs: what differs, which is better beyond noise, and whether one setting explains it."""
    held = stated_bytes(others, "--used-by-others") if others else 0
    found = compare(
        *sources, gpu=gpu, used_by_others=held, price=price, columns=_columns(column),
        tell=partial(print_notes, quiet=as_json),
    )  # fmt: skip
    if isinstance(found, ForecastCheck):
        errors, schema = {row.id: row.error for row in found.rows}, forecast_check.SCHEMA
        print_answer(found, schema, lambda: run_view.comparison_document(found), as_json=as_json, errors=errors)
    else:
        print_answer(found, SCHEMA, lambda: compare_view.document(found), as_json=as_json)


def _columns(words: list[str]) -> dict[str, str]:
    """{role: column} of --column. Raises UserError for a role that there is not."""
    found = {}
    for word in words:
        role, equals, name = word.partition("=")
        if not equals or role not in NAMES or not name:
            raise UserError("usage.bad_column", value=word[:80], roles=list(NAMES))
        found[role] = name
    return found
