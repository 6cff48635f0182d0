"""Pictures of what happened over time: losses over what was spent, speed and the card over the hours."""

from foretrain.analysis.run_pace import Sign, VitalSigns
from foretrain.base.messages import listed
from foretrain.comparison.loss_axes import AxisName, LossCurve, LossCurves
from foretrain.predict.timing import JOULES_PER_KWH
from foretrain.reports.document import Axis, Block, Curves, Level, Message, Paragraph, Span, Trace

FACTORS: dict[AxisName, float] = {"hours": 3600.0, "kwh": JOULES_PER_KWH}
SIGN_FORMATS = {"mfu": "percent", "memory_bytes": "bytes", "tokens_per_s": "number"}


def losses(
    found: LossCurves,
    *,
    levels: tuple[Level, ...] = (),
    source: str = "report.source_losses",
    order: tuple[str, ...] = (),
) -> tuple[Block, ...]:
    """Draw the loss over each known axis, one picture for each unit. `order`: labels whose places are the colours."""
    guessed = {"names": listed(found.predicted_hours)}
    predicted = (Paragraph(Message("report.predicted_hours", guessed)),) if found.predicted_hours else ()
    return predicted + tuple(
        _losses(found, [c for c in found.curves if c.unit == unit], levels, source, order)
        for unit in dict.fromkeys(curve.unit for curve in found.curves)
    )


def _losses(
    found: LossCurves, curves: list[LossCurve], levels: tuple[Level, ...], source: str, order: tuple[str, ...]
) -> Curves:
    axes = tuple(_axis(name, found.currency) for name in found.axes)
    traces = tuple(
        Trace(
            _label(curve, bool(order)),
            tuple(tuple(x * FACTORS.get(name, 1.0) for x in curve.axes[name]) for name in found.axes), curve.losses,
            order.index(curve.label) if order else int(curve.kind == "val"), curve.kind == "val",
        )
        for curve in curves
    )  # fmt: skip
    y = Axis(Message("axis.loss_in", {"unit": loss_unit(curves[0].unit)}), "number")
    energy = Message(f"energy_from.{found.energy_source}")
    return Curves(
        Message("picture.loss_over"), axes, y, traces, levels, source=Message(source, {"energy": energy}), smooth=True
    )


def loss_unit(unit: str) -> Message:
    return Message(f"side_unit.{next(word for word in ('nats', 'bits', 'preference', 'policy') if word in unit)}")


def _axis(name: AxisName, currency: str) -> Axis:
    labels: dict[AxisName, tuple[str, str]] = {
        "tokens": ("axis.tokens", "count"), "hours": ("axis.hours", "duration"), "kwh": ("axis.energy", "energy"),
        "cost": ("axis.cost", "money"), "step": ("axis.step", "number"),
    }  # fmt: skip
    id, format = labels[name]
    return Axis(Message(id, {"currency": currency}), format)


def _label(curve: LossCurve, many: bool) -> Message:
    if many:
        return Message(f"loss_of.{curve.kind}", {"name": curve.label})
    return Message("axis.train" if curve.kind == "train" else "axis.val")


def signs(found: VitalSigns, silent: str = "") -> tuple[Block, ...]:
    """Draw each sign, with the stretches of held-back clock; `silent`: the text that says why the card is silent."""
    spans = tuple(
        Span(Message(f"throttle.{t.reason}"), t.from_hours * 3600, t.to_hours * 3600) for t in found.throttled
    )
    pictures = tuple(_sign(sign, spans) for sign in found.signs)
    blocks: list[Block] = []
    if spans:
        reasons = list(dict.fromkeys(t.reason for t in found.throttled))
        for reason in reasons:
            hours = sum(t.to_hours - t.from_hours for t in found.throttled if t.reason == reason)
            values = {"reason": Message(f"throttle.{reason}"), "time": hours * 3600}
            blocks.append(Paragraph(Message("report.throttled", values), "plain" if reason == "power_cap" else "warn"))
    elif found.sign("clock_ghz") is not None:
        blocks.append(Paragraph(Message("report.not_throttled"), "good"))
    if found.sign("power_w") is None:
        blocks.append(Paragraph(Message(silent or ("report.card_silent" if found.on_card else "report.no_card"))))
    return *blocks, *pictures


def _sign(sign: Sign, spans: tuple[Span, ...]) -> Curves:
    label = Message("axis.speed" if sign.name == "tokens_per_s" else f"axis.{sign.name}")
    trace = Trace(label, (tuple(h * 3600 for h in sign.hours),), sign.values)
    return Curves(
        Message(f"sign.{sign.name}"), (Axis(Message("axis.hours"), "duration"),),
        Axis(label, SIGN_FORMATS.get(sign.name, "number")), (trace,), spans=spans, source=Message("axis.measured"),
        small=True,
    )  # fmt: skip
