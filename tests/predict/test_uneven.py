"""Where a larger micro-batch needs less memory, each screen that shows two of them says why."""

from foretrain.advice.advisor import advise
from foretrain.advice.outlook import Frontier, FrontierPoint
from foretrain.advice.record import Setting
from foretrain.base.messages import say
from foretrain.base.units import GIB
from foretrain.config.options import RunConfig
from foretrain.hardware.catalogue import find
from foretrain.predict.forecast import Probe
from foretrain.predict.largest import Largest
from foretrain.predict.plan import plan
from foretrain.reports.document import Paragraph
from foretrain.reports.views import advice as advice_view
from foretrain.reports.views import limits as limits_view
from foretrain.reports.views import outlook as outlook_view
from foretrain.reports.views.shared import uneven


def said(blocks: object) -> list[str]:
    assert isinstance(blocks, tuple | list)
    return [block.message.text() for block in blocks if isinstance(block, Paragraph)]


WHY = say("largest.uneven")


def test_only_where_it_falls() -> None:
    assert said(uneven([(8, 5 * GIB), (12, 4 * GIB)])) == [WHY]
    assert said(uneven([(12, 4 * GIB), (8, 5 * GIB)])) == [WHY]
    assert said(uneven([(8, 4 * GIB), (12, 5 * GIB), (16, None)])) == []
    assert said(uneven([(8, 4 * GIB), (8, 5 * GIB)])) == []
    assert said(uneven([])) == []


def test_a_search_over_traces() -> None:
    def blocks(option: str, falling: bool) -> list[str]:
        sizes = (5 * GIB, 4 * GIB) if falling else (4 * GIB, 5 * GIB)
        probes = tuple(
            Probe(value=value, verdict="fits", needed_expected_bytes=size, smallest_limit_bytes=size)
            for value, size in zip((8, 12), sizes, strict=True)
        )
        found = Largest(
            option=option, value=12, searched_all=False, available_bytes=12 * GIB, probes=probes, source="traced"
        )
        document = limits_view.largest(plan(RunConfig(), find("RTX 4070")), found)
        return [text for section in document.sections for text in said(section.blocks)]

    assert WHY in blocks("batch_size", True)
    assert WHY not in blocks("batch_size", False)
    assert WHY not in blocks("n_layer", True)


def test_ways_in_a_report() -> None:
    def point(way: str, batch_size: int, needed: int) -> FrontierPoint:
        return FrontierPoint(way=way, batch_size=batch_size, setting="", needed_bytes=needed, tokens_per_s=1.0)  # type: ignore[arg-type]

    def texts(*points: FrontierPoint) -> list[str]:
        found = Frontier(points=points, available_bytes=12 * GIB, source="estimated")
        return said(outlook_view._frontier(found))

    assert WHY in texts(point("as_is", 8, 5 * GIB), point("as_is", 12, 4 * GIB))
    assert WHY not in texts(point("as_is", 8, 4 * GIB), point("as_is", 12, 5 * GIB))
    assert WHY not in texts(point("as_is", 8, 5 * GIB), point("checkpointing", 12, 4 * GIB))


def test_advice_of_a_larger_micro_batch() -> None:
    config = RunConfig(batch_size=8, gradient_accumulation_steps=6)
    base = plan(config, find("RTX 4070"))
    found = advise(base, step="foretrain")
    first = found.advised[0]
    small = first.effect.model_copy(update={"needed_bytes": found.now.needed_bytes - GIB})

    def texts(**values: int) -> list[str]:
        settings = tuple(Setting(option=name, before=1, after=after, ours=False) for name, after in values.items())
        changed = first.model_copy(update={"settings": settings, "effect": small, "gpu": found.gpu})
        document = advice_view.document(base, found.model_copy(update={"advised": (changed,)}))
        return [text for section in document.sections for text in said(section.blocks)]

    assert WHY in texts(batch_size=16, gradient_accumulation_steps=3)
    assert WHY not in texts(batch_size=4, gradient_accumulation_steps=12)
    assert WHY not in texts(batch_size=16, loss_chunk_size=512)
