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


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:g}"


def _all(cards: list[Gpu]) -> Document:
    rows = tuple(
        (
            gpu.name,
            gpu.architecture,
            _number(gpu.sm_count),
            Quantity(gpu.memory_bytes, "bytes"),
            _number(gpu.bandwidth_gb_per_s),
            _number(gpu.bf16_dense_tflops),
            _number(gpu.fp16_dense_tflops),
            _number(gpu.fp16_acc16_dense_tflops),
            _number(gpu.tf32_dense_tflops),
            _number(gpu.fp32_tflops),
            _number(gpu.fp8_dense_tflops),
            _number(gpu.board_power_w),
        )
        for gpu in cards
    )
    names = (
        "gpu",
        "architecture",
        "sm",
        "memory",
        "bandwidth",
        "bf16",
        "fp16",
        "fp16_acc16",
        "tf32",
        "fp32",
        "fp8",
        "power",
    )
    columns = tuple(Message(f"column.{name}") for name in names)
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
