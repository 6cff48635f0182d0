"""`foretrain gpus`: the catalogue of cards."""

from foretrain.cli.command import argument, command, json_option
from foretrain.cli.common import OUT, print_json
from foretrain.hardware.catalogue import Gpu, catalogue, find
from foretrain.reports import text
from foretrain.reports.document import Cell, Document, Message, Quantity, Section, Table

EPILOG = """Examples:
foretrain gpus
foretrain gpus 4070
foretrain gpus --json"""
COLUMNS = {
    "gpu": "name",
    "architecture": "architecture",
    "sm": "sm_count",
    "memory": "memory_bytes",
    "bandwidth": "bandwidth_gb_per_s",
    "bf16": "bf16_dense_tflops",
    "fp16": "fp16_dense_tflops",
    "fp16_acc16": "fp16_acc16_dense_tflops",
    "tf32": "tf32_dense_tflops",
    "fp32": "fp32_tflops",
    "fp8": "fp8_dense_tflops",
    "power": "board_power_w",
}


@command("gpus", EPILOG)
@argument("name", "Show one card with its sources. Default: all cards.", required=False)
@json_option
def gpus_command(name: str | None, as_json: bool) -> None:
    """List the known cards: memory, bandwidth, dense peaks by dtype, power, and the source of each figure."""

    cards = [find(name)] if name else list(catalogue().values())
    if as_json:
        print_json({"schema": "foretrain.gpus/1", "gpus": [gpu.model_dump(mode="json") for gpu in cards]})
    elif name:
        text.render(_one(cards[0]), OUT)
    else:
        text.render(_all(cards), OUT)


def _cell(value: object) -> str:
    return "–" if value is None else f"{value:g}" if isinstance(value, int | float) else str(value)


def _all(cards: list[Gpu]) -> Document:
    rows = tuple(
        tuple(
            Quantity(gpu.memory_bytes, "bytes") if name == "memory" else _cell(getattr(gpu, field))
            for name, field in COLUMNS.items()
        )
        for gpu in cards
    )
    columns = tuple(Message(f"column.{name}") for name in COLUMNS)
    table = Table(columns, rows, frozenset(range(2, 12)), optional=(7, 1, 10, 2, 8, 11))
    title, subtitle = Message("gpus.title", {"count": len(cards)}), Message("gpus.subtitle")
    return Document(title, subtitle, [Section(Message("gpus.section"), (table,))])


def _one(gpu: Gpu) -> Document:
    """Every figure of a card with its unit in the name, as in gpus.toml."""
    rows: list[tuple[Cell, ...]] = [
        (field, ", ".join(value) if isinstance(value, tuple) else str(value))
        for field, value in gpu
        if value not in (None, "", ())
    ]
    section = Section(Message("gpus.section"), (Table((), tuple(rows)),))
    return Document(Message("gpus.one", {"name": gpu.name}), Message("gpus.subtitle"), [section])
