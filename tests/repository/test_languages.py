"""Languages: the same ids and placeholders in each, English where one has none, numbers that stay legible, `--lang`."""

import io
import json
import re
import string
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from foretrain.advice.advisor import advise
from foretrain.advice.asked import Asked
from foretrain.advice.cards import compared
from foretrain.advice.record import Advices
from foretrain.analysis.explanation import Explanation
from foretrain.analysis.explanation import explain as explanation
from foretrain.analysis.log_analysis import LogAnalysis, analyse
from foretrain.app.explain import LogExplanation
from foretrain.base import messages
from foretrain.base.errors import UserError
from foretrain.base.quantities import parse_limit
from foretrain.cli import app
from foretrain.cli import help as cli_help
from foretrain.config.finetune.options import FINETUNE_OPTIONS
from foretrain.config.inference import WORDS
from foretrain.config.options import OPTIONS
from foretrain.config.resolve import resolve
from foretrain.hardware.catalogue import find
from foretrain.hardware.cpu import cpu_device
from foretrain.measure import verify_record as verification
from foretrain.predict.plan import Plan, plan
from foretrain.predict.pretraining import of_plan
from foretrain.predict.within import within
from foretrain.reports import html, text
from foretrain.reports.document import (
    Document,
    Figures,
    Message,
    Paragraph,
    Place,
    Quantity,
    Table,
    Verbatim,
    cell_text,
)
from foretrain.reports.numbers import behind
from foretrain.reports.views import advice as advice_view
from foretrain.reports.views import agreement as verify_view
from foretrain.reports.views import cards as cards_view
from foretrain.reports.views import explain as explain_view
from foretrain.reports.views import limits as limits_view
from foretrain.reports.views import log as log_view
from foretrain.reports.views import plan as plan_view
from foretrain.runs.training_log import read_log
from foretrain.web import calls
from tests.kit import translations
from tests.kit.command import REPO, foretrain
from tests.kit.language import ARABIC, BRACKETS, ENGLISH, SAME, pretending, unsaid
from tests.kit.reports import run_document

KNOBS = {f"knob.{knob.name}": knob.help for knob in OPTIONS.values()}
KNOBS |= {
    f"{option.texts}.{option.name}": option.help for option in (*FINETUNE_OPTIONS.values(), *WORDS.options.values())
}
HELPS = KNOBS | cli_help.texts(app)
WANTED = ENGLISH | HELPS
OWN = [id for id in messages.languages() if id != "en"]
MARKS = messages.MARKS


@pytest.fixture
def pretence() -> Iterator[None]:
    with pretending():
        yield


def values_of(template: str) -> list[tuple[str, str, str]]:
    """(name, format, conversion) of every placeholder, sorted: their order is the language's own affair."""
    found = string.Formatter().parse(template)
    return sorted((name, spec or "", conversion or "") for _, name, spec, conversion in found if name is not None)


def not_nouns(template: str) -> list[tuple[str, str, str]]:
    """The same without {count:step|steps}: how a noun follows its count is the language's own affair."""
    return [value for value in values_of(template) if "|" not in value[1]]


def sample(spec: str, conversion: str) -> object:
    if spec == "bytes_range":
        return (2**30, 2**31)
    if spec.endswith("_span"):
        return (2**30, 2**31, 2**32, "EUR") if spec == "money_span" else (2**30, 2**31, 2**32)
    return 12.5 if spec in messages.FORMATS or re.search(r"[,f%]", spec) else "x" if conversion else 7


@pytest.mark.parametrize("id", [*OWN, BRACKETS, ARABIC])
def test_language_has_only_english_ids_with_same_placeholders(id: str) -> None:
    with pretending():
        assert re.fullmatch(r"ltr|rtl", messages.languages()[id].direction)
        assert messages.languages()[id].name.strip()
        for key, own in messages.texts_of(id).items():
            assert key in WANTED, key
            assert isinstance(own, str), key
            assert own.strip() or not WANTED[key], key
            if not key.startswith(
                ("knob.", "finetune_knob.", "inference_knob.", "cli_help.")
            ):  # helps are not templates
                assert not_nouns(own) == not_nouns(WANTED[key]), key
                said = messages.say(key, id, **{n: sample(s, c) for n, s, c in values_of(own)})
                assert said.strip() or not own, key


@pytest.mark.parametrize("id", OWN)
def test_language_writes_western_digits_and_no_own_marks(id: str) -> None:
    for key, own in messages.texts_of(id).items():
        assert not re.search(r"[\u0660-\u0669\u06f0-\u06f9\u0966-\u096f]", own), key
        assert not re.search(r"[\u200e\u200f\u202a-\u202e\u2066-\u2069]", own), key  # bidi.py sets them


@pytest.mark.parametrize("id", OWN)
def test_words_that_are_typed_stay_as_they_are(id: str) -> None:
    """Options, backticked commands and knob assignments of the English own are in the translation, too."""
    typed = re.compile(r"--[a-z][a-z_-]+|`[^`]+`")
    for key, own in messages.texts_of(id).items():
        assert set(typed.findall(own)) == set(typed.findall(WANTED[key])), key


def test_what_is_missing_is_said_in_english_and_listed(pretence: None) -> None:
    half = {"language.name": "Halb", "language.direction": "ltr", "axis.step": "Schritt", "axis.nothing": "x"}
    with pretending(qha=half):
        assert messages.say("axis.step", "qha") == "Schritt"
        assert messages.say("axis.loss", "qha") == ENGLISH["axis.loss"]
        found = translations.coverage("qha")
        assert (found.texts, found.of) == (1, len(ENGLISH))
        assert set(found.missing) == set(ENGLISH) - {"axis.step"}
        assert found.unknown == ("axis.nothing",)
        listed = {one["id"]: one for one in json.loads(foretrain("languages", "--json").stdout)["languages"]}
        assert listed["qha"]["texts"] == 1
        assert "1 of " in foretrain("languages").stdout


@pytest.mark.parametrize("id", OWN)
def test_no_text_is_missing_or_left_in_english(id: str) -> None:
    found = translations.coverage(id, frozenset(HELPS))
    assert (found.missing, found.untranslated, found.unknown) == ((), (), ())
    assert found.texts == found.of
    used = {word for own in messages.texts_of(id).values() for word in translations.english_words(own, frozenset())}
    kept = messages.file_of(id)["language.kept"]
    assert len(set(kept)) == len(kept)
    assert set(kept) <= used | {word.lower() for word in used}, "kept, and nowhere used"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("शुरुआती step", ["step"]), ("Runs: {count}", ["Runs"]), ("Preset, preset", ["Preset", "preset"]), ("weights, gradients", ["weights", "gradients"]),
        ("tokens/s", ["tokens"]), ("8-bit", ["bit"]), ("512-byte blocks", ["byte", "blocks"]), ("micro-batch", ["micro-batch"]), ("وkernels", ["kernels"]),
        ("loss और Loss", []), ("`foretrain plan`", []), ("foretrain train", []), ("--max-document", []), ("{tokens:,} {step:step|steps}", []), ("GPU, GiB, nanoGPT, kWh", []),
        ("B x T · C", []), ("block_size, meta.pkl, bf16, gpt2", []), ("compile = false, recipe = {recipe}", []), ("config/*.py, docs/advice.md", []),
        ("“iter 10: loss 4.2, time 3905.11ms”", []), ("“अनुमान time”", ["time"]), ("https://pytorch.org/memory_viz", []), ("hf://datasets/NAME", []), ("टोकन", []), ("", []),
    ],
)  # fmt: skip
def test_what_counts_as_an_english_word(text: str, words: list[str]) -> None:
    assert list(translations.english_words(text, frozenset({"loss", "foretrain"}))) == words


def test_a_text_with_an_english_word_counts_as_untranslated(pretence: None) -> None:
    own = {
        "language.name": "हिन्दी",
        "language.direction": "ltr",
        "axis.step": "शुरुआती step",
        "axis.loss": "loss",
        "page.runs": "Runs",
    }
    with pretending(qhi=own | {"language.kept": ["loss"]}, qhj=own):
        found = translations.coverage("qhi")
        assert found.untranslated == (("axis.step", ("step",)), ("page.runs", ("Runs",)))
        assert found.texts == 1
        assert translations.coverage("qhj").texts == 3  # it lists no kept words: it may be written in Latin letters


def test_english_is_whole() -> None:
    result = foretrain("languages", "--json")
    found = {one["id"]: one for one in json.loads(result.stdout)["languages"]}
    assert found["en"]["texts"] == found["en"]["of"]
    assert found.keys() == {path.stem for path in (REPO / "foretrain" / "locales").glob("*.toml")}


def test_language_is_an_option_of_every_verb_or_a_variable(pretence: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for words in (
        ["gpus", "--lang", BRACKETS], ["--lang", BRACKETS, "gpus"], ["gpus", f"--lang={BRACKETS.upper()}"],
        ["plan", "gpt2-124m", "--gpu", "4070", "--lang", f"{BRACKETS}_EG.UTF-8"], ["data", "--lang", BRACKETS, "mix", "--help"],
    ):  # fmt: skip
        assert foretrain(*words).returncode == 0, words
    assert "⟦card⟧" in foretrain("gpus", "--lang", BRACKETS).stdout
    assert "⟦" not in foretrain("gpus").stdout  # spoken for one command only
    assert messages.current().id == "en"
    monkeypatch.setenv("FORETRAIN_LANG", BRACKETS)
    assert "⟦card⟧" in foretrain("gpus").stdout
    assert "⟦" not in foretrain("gpus", "--lang", "en").stdout  # the option goes before
    error = foretrain("gpus", "RTX 9999", code=2)
    assert error.stderr.startswith("⟦error:⟧ ")


def test_the_locale_of_the_system_decides_nothing(pretence: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LANG", "LC_ALL", "LC_MESSAGES", "LANGUAGE"):
        monkeypatch.setenv(name, f"{BRACKETS}.UTF-8")
    assert "⟦" not in foretrain("gpus").stdout


@pytest.mark.parametrize("word", ["xx", "", "../en", "english", "en/../ar", "\x1b[31m", "e" * 10_000])
def test_unknown_language_is_one_sentence_with_known_ones(word: str) -> None:
    result = foretrain("gpus", "--lang", word, code=2)
    assert "the languages are en" in result.stderr
    assert result.stderr.count("\n") == 1
    assert "\x1b" not in result.stderr
    assert len(result.stderr) < 300
    as_json = foretrain("gpus", "--lang", word, "--json")
    assert json.loads(as_json.stdout)["id"] == "usage.unknown_language"


def test_json_is_english_whatever_is_spoken(pretence: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for words in (
        ["gpus", "4070"],
        ["plan", "baby", "--gpu", "4070"],
        ["gpus", "RTX 9999"],
        ["plan", "baby", "--n_head=7"],
    ):
        plain = foretrain(*words, "--json")
        for id in (BRACKETS, ARABIC):
            other = foretrain(*words, "--json", "--lang", id)
            assert (other.returncode, other.stdout, other.stderr) == (plain.returncode, plain.stdout, plain.stderr)
        monkeypatch.setenv("FORETRAIN_LANG", ARABIC)
        assert foretrain(*words, "--json").stdout == plain.stdout
        monkeypatch.delenv("FORETRAIN_LANG")


def test_words_behind_two_dashes_are_another_programs() -> None:
    result = foretrain("watch", "--quiet", "--", "echo", "--lang", "xx", "--json", apart=True, code=0)
    assert "--lang xx --json" in result.stdout


@pytest.mark.parametrize(
    ("accepted", "id"),
    [
        ("dv", ARABIC), ("dv-MV,en;q=0.9", ARABIC), ("fr,de;q=0.9", None), ("en;q=0.3, dv;q=0.8", ARABIC), ("", None),
        ("dv;q=0, en", "en"), ("*", None), (";;;q=,,,", None), ("en-GB-oed", "en"), ("dv;q=nan,en;q=0.1", "en"),
        ("dv" * 5000, None), ("DV", ARABIC), ("dv;q=2, en;q=0.1", "en"),
    ],
)  # fmt: skip
def test_what_a_browser_likes(pretence: None, accepted: str, id: str | None) -> None:
    assert messages.preferred(accepted) == id


def test_speaking_is_for_one_thread(pretence: None) -> None:
    heard = {}
    with messages.speaking(ARABIC):
        thread = threading.Thread(target=lambda: heard.update(there=messages.current().id))
        thread.start()
        thread.join()
        heard["here"] = messages.current().id
    assert heard == {"there": "en", "here": ARABIC}
    before = messages.set_language(BRACKETS)
    try:
        thread = threading.Thread(target=lambda: heard.update(there=messages.current().id))
        thread.start()
        thread.join()
        assert heard["there"] == BRACKETS
    finally:
        messages.set_language(before)


# -- lines from the right ------------------------------------------------------------------------------------


def shown(text: str) -> list[str]:
    return re.findall(r"[\u2066\u2068]([^\u2066-\u2069]*)\u2069", text)


@pytest.mark.parametrize(
    ("text", "runs"),
    [
        ("الذاكرة 12.5 GiB هنا", ["12.5 GiB"]), ("أعط --lang ar.", ["--lang ar"]), ("عدد 12 فقط", []), ("-3%", ["-3%"]),
        ("(من 5.75 GiB إلى 8.02 GiB) ثم", ["5.75 GiB", "8.02 GiB"]), ("فائض (× 1.02 إلى 1.33)", ["× 1.02", "1.33"]),
        ("خطوة nanoGPT، مع compile", ["nanoGPT", "compile"]), ("12 GiB · bf16 · نعم", ["12 GiB", "bf16"]),
        ("batch_size = 12 (my.toml): خطأ", ["batch_size = 12 (my.toml)"]), ("`foretrain plan` يبيّن", ["`foretrain plan`"]),
        ("من .toml أو .py.", [".toml", ".py"]), ("القيم {count} من {name}", ["{count}", "{name}"]), ("نعم", []), ("", []),
        ("  All in English.", ["All in English."]),
    ],
)  # fmt: skip
def test_latin_runs_are_isolated(pretence: None, text: str, runs: list[str]) -> None:
    with messages.speaking(ARABIC):
        made = messages.isolated(text)
        assert shown(made) == runs
        assert messages.without_marks(made) == text
        assert messages.isolated(made) == made
    assert messages.isolated(text) == text  # in English there is nothing to do


@given(st.text(alphabet="ab1 .,()-=·\n%ابج،\u2066\u2067\u2068\u2069\u202e`", max_size=60))
def test_isolation_is_balanced_and_idempotent(pretence: None, text: str) -> None:
    with messages.speaking(ARABIC):
        made = messages.isolated(text)
        assert messages.without_marks(made) == messages.without_marks(text)
        assert messages.without_marks(messages.isolated(made)) == messages.without_marks(text)
        for line in made.split("\n"):
            depth = 0
            for sign in line:
                depth += (sign in "\u2066\u2067\u2068") - (sign == "\u2069" and depth > 0)
            assert depth == 0


def test_a_block_to_copy_has_nothing_unseen_in_it(pretence: None) -> None:
    with messages.speaking(ARABIC):
        said = str(UserError("gpu.unknown", name="RTX 99", near="RTX 3090", block='["RTX 99"]\nsm_count = ?'))
    first, *block = said.split("\n")
    assert any(mark in first for mark in MARKS)
    assert block == ['["RTX 99"]', "sm_count = ?"]


def test_values_are_isolated_wherever_they_stand(pretence: None) -> None:
    inner = Message("plan.title", {"name": "تجربة 7"})
    with messages.speaking(ARABIC):
        assert shown(Quantity(2**30, "bytes").text()) == ["1.00 GiB"]
        assert shown(cell_text("RTX 4070")) == ["RTX 4070"]
        said = Message("plan.subtitle_short", {"gpu": "RTX 4070", "dtype": "bfloat16", "source": inner}).text()
        assert "\u2066RTX 4070\u2069" in said
        assert said.count("\u2068") + said.count("\u2066") == said.count("\u2069")
        assert "\u2068" + inner.text() + "\u2069" in said  # a name in Arabic does not pull what stands beside it
        assert messages.printable(said) == said
        assert "\u202e" not in messages.printable("a\u202eb")  # nobody else's marks
    assert "\ufffd" in messages.printable("\u2066a\u2069")


def test_an_error_is_said_in_the_language_of_who_reads_it(pretence: None) -> None:
    error = UserError("usage.one_speed", option="--step-time", count=2)
    with messages.speaking(ARABIC):
        assert "\u2066--step-time\u2069" in str(error)
    assert str(error).startswith("--step-time is the speed of one device")


# -- nothing is said but by id -------------------------------------------------------------------------------


CASES, CARDS = REPO / "examples" / "real-cases", ("3060", "4070", "4090")


@cache
def planned(name: str, gpu: str) -> Plan:
    """What the engines make of it, once: they know no language."""
    config = resolve([str(CASES / name) if name.endswith(".py") else name]).config
    return plan(config, cpu_device() if gpu == "cpu" else find(gpu), name=name, used_by_others_bytes=2 * 10**9)


def cards() -> Document:
    plans = [planned("c.py", card) for card in CARDS]
    return cards_view.document(plans, compared(plans))


@cache
def analysed() -> LogAnalysis:
    log = REPO / "examples" / "logs" / "c-out-of-memory.log"
    config = resolve([str(CASES / "c.py")]).config
    return analyse(read_log(log), name=log.name, config=config, gpu=find("RTX 4070"))


@cache
def advised() -> Advices:
    return advise(planned("c.py", "4070"), "nanogpt")


def trained() -> Document:
    with TemporaryDirectory() as folder:
        return run_document(Path(folder) / "out-baby")


@cache
def observed() -> Explanation:
    readings = {"observed_bytes": 6582 * 2**20, "process_bytes": 4464 * 2**20}
    return explanation(planned("gpt2-124m", "4070"), step="nanogpt", **readings)


def verified() -> Document:
    found = verification.read(REPO / "tests" / "data" / "verify_on_a_card_that_computes_nothing.json")
    ends: tuple[tuple[Any, Any, dict[str, Any]], ...] = (
        ("skipped", "memory", {"needed": 9 * 2**30, "free": 2**30}), ("failed", "timeout", {"limit": 240.0}),
        ("failed", "ended", {"code": 7}), ("skipped", "no_compile", {"problem": "3"}), ("failed", "error", {"problem": "4"}),
        ("out_of_memory", "out_of_memory", {"needed": 9 * 2**30, "free": 2**30}), ("waiting", None, {}),
    )  # fmt: skip
    changed = [
        each.model_copy(
            update={"status": status, "measured": None, "reason": id and verification.Reason(id=id, values=values)}
        )
        for each, (status, id, values) in zip(found.outcomes, ends, strict=False)
    ]
    busy = found.outcomes[len(ends)].model_copy(update={"busy": True})
    outcomes = (*changed, busy, *found.outcomes[len(ends) + 1 :])
    return verify_view.verify_document(found.model_copy(update={"outcomes": outcomes}), "r.json")


VIEWS: dict[str, Callable[[], Document]] = {
    "plan": lambda: plan_view.document(planned("gpt2-124m", "4070")),
    "plan for a CPU": lambda: plan_view.document(planned("baby", "cpu")),
    "plan that does not fit": lambda: plan_view.document(planned("gpt2-774m", "4070"), advice=advised()),
    "cards": cards,
    "within": lambda: limits_view.within(
        made := planned("gpt2-124m", "4070"), within(of_plan(made), parse_limit("12h"))
    ),
    "advice": lambda: advice_view.document(planned("c.py", "4070"), advised()),
    "one advice": lambda: advice_view.one(planned("c.py", "4070"), advised(), 1, Asked()),
    "explanation": lambda: explain_view.document(observed(), planned("gpt2-124m", "4070")),
    "log": lambda: log_view.document(LogExplanation(log=analysed())),
    "run": trained,
    "verification": verified,
}


def without_pictures(page: Any) -> Any:
    """A page's JSON without the elements of its pictures: where they lie depends on how wide the words are."""
    if isinstance(page, dict):
        return {key: without_pictures(value) for key, value in page.items() if key not in ("figure", "picture")}
    return [without_pictures(each) for each in page] if isinstance(page, list) else page


def forms(document: Document) -> dict[str, str]:
    console = Console(file=io.StringIO(), width=200, color_system=None, highlight=False)
    text.render(document, console)
    page = json.dumps(without_pictures(html.document_json(document)), ensure_ascii=False)
    return {"terminal": console.file.getvalue(), "html": html.render(document), "page": page}  # type: ignore[attr-defined]


def numbers(said: str) -> list[str]:
    return sorted(re.findall(r"\d[\d,.]*\d|\d", re.sub("[⟦⟧\u2066-\u2069]", " ", said)))


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_speaks_each_language_by_text_ids(view: str, pretence: None) -> None:
    english = forms(VIEWS[view]())["page"]
    for id in [*OWN, BRACKETS, ARABIC]:
        with messages.speaking(id):
            found = forms(VIEWS[view]())
        assert all(found.values())
        if id in (BRACKETS, ARABIC):  # the same words elsewhere, so the same numbers
            assert numbers(found["page"]) == numbers(english)
        if messages.languages()[id].direction == "rtl":
            for unit in ("GiB", "MiB", "ms", "kWh"):  # no number stands apart from its unit
                assert not re.search(rf"\d {unit}(?![^\u2066-\u2069]*\u2069)", found["page"]), unit
        if id == BRACKETS:
            kept = set(re.findall(r"[A-Za-z]{3,}", unsaid(visible(VIEWS[view], id))))
            assert not kept - SAME, kept - SAME


def visible(view: Callable[[], Document], id: str) -> str:
    """All texts of a document, without the names that JSON gives them."""
    with messages.speaking(id):
        document = view()
        places: tuple[Place, ...] = ("terminal", "page")
        blocks = [block for place in places for _, shown in document.on(place) for block in shown]
        said = [
            document.title.text(),
            document.subtitle.text(),
            *(section.title.text() for section in document.sections),
        ]
        for block in blocks:
            if isinstance(block, Paragraph):
                said.append(block.message.text())
            elif not isinstance(block, Verbatim):
                said += [] if isinstance(block, Table | Figures) else [block.title.text()]
                table = block if isinstance(block, Table) else behind(block)
                said += [cell_text(cell) for row in (table.columns, *table.rows) for cell in row]
    return "\n".join(said)


def test_the_form_is_said_in_its_language(pretence: None) -> None:
    with messages.speaking(BRACKETS):
        for field in calls.fields():
            assert field["help"].startswith("⟦"), field["name"]
            assert not field["unit"] or field["unit"].startswith("⟦"), field["unit"]
    result = foretrain("plan", "baby", "--show-config", "--lang", BRACKETS)
    assert "⟦transformer" in result.stdout  # its cell may be wrapped
