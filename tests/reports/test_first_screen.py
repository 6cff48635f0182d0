"""The first screen of `plan`: a dozen lines that answer does it fit, how long, how much, what to do."""

import io
import json
import re
import shlex

import pytest
from rich.console import Console

from foretrain.base.messages import format_value, has, say, speaking, texts
from foretrain.base.units import GIB, format_rough
from foretrain.config.resolve import WORDS, resolve
from foretrain.hardware.catalogue import find
from foretrain.predict.memory import gathered
from foretrain.predict.plan import Plan, plan
from foretrain.predict.spec import StepSpec
from foretrain.predict.speed.limit import bottleneck
from foretrain.predict.trace.record import Allocation, role_of
from foretrain.reports import text
from foretrain.reports.document import Message, Row, Screen
from tests.kit.command import REPO, first_screen, foretrain

CASE_C, CASE_D = (str(REPO / "examples" / "real-cases" / f"{case}.py") for case in "cd")
SCREENS = {
    "fits": ["gpt2-124m", "--gpu", "4070", "--used-by-others", "2GB"],
    "tight": ["gpt2-124m", "--gpu", "4060", "--used-by-others", "2.3GB"],
    "does not fit": ["gpt2-774m", "--gpu", "4070"],
    "cpu": ["baby", "--gpu", "cpu", "--dataset=openwebtext"],
    "cards": ["gpt2-124m", "--gpu", "3060,4070,4090"],
    "fine-tuning gpt2-xl": ["--init_from=gpt2-xl", "--gpu", "4070", "--dataset=shakespeare", "--max_iters=20",
                            "--warmup_iters=0", "--decay_lr=false", "--learning_rate=3e-5"],
    "eval_only": ["gpt2-124m", "--gpu", "4070", "--eval_only=true"],
    "auto": ["gpt2-124m", "--gpu", "4070", "--batch_size=auto"],
    "within": ["gpt2-124m", "--gpu", "4070", "--within", "12h"],
    "best": ["--gpu", "4070", "--best", "--within", "20h"],
    "step time and rent": [CASE_D, "--gpu", "4070", "--step-time", "3.9", "--price", "0.35/h"],
    "a nanoGPT file": [CASE_C, "--gpu", "4070", "--used-by-others", "2.1GB"],
    "the most lines": ["examples/nanogpt/config/finetune_shakespeare.py", "--gpu", "4070"],
    "the longest change": ["gpt2-124m", "--init_from=gpt2-large", "--gpu", "4070"],
    "no memory and speed known": ["gpt2-124m", "--gpu", "M1 Pro", "--compile=false"],
}  # fmt: skip
VERDICTS = ("Fits.", "Tight.", "Does not fit.", "fits", "Peak")


@pytest.mark.parametrize("words", SCREENS.values(), ids=SCREENS)
def test_a_dozen_lines_answer(words: list[str]) -> None:
    result = first_screen("plan", *words, most_lines=12)
    lines = result.stdout.splitlines()
    assert all(line == line.rstrip() for line in lines)
    labels = {match[1] for line in lines if (match := re.match(r"  (\w+)  ", line))}
    assert any(word in result.stdout for word in VERDICTS)
    assert {"next"} <= labels
    assert {"time", "cost"} <= labels or re.search(r"card .* time .* cost", result.stdout)
    assert re.search(r"foretrain (train|plan|advise)|python train\.py", result.stdout)
    assert re.search(r"\d (s|min|h|days) \(.+–.+\)|unknown", result.stdout)  # hours never without their range


@pytest.mark.parametrize(
    ("id", "lang"), [("the most lines", "en"), ("the longest change", "en"), ("auto", "ar"), ("fits", "hi")]
)
def test_what_could_change_the_verdict_is_never_left_out(id: str, lang: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(REPO)
    shown = foretrain("plan", *SCREENS[id], "--lang", lang).stdout
    assert len(shown.splitlines()) <= 12
    assert ("--used-by-others" in shown) == ("--used-by-others" not in SCREENS[id])


def test_search_for_the_best_model_assumes_what_a_plan_does() -> None:
    assumed = screen(*SCREENS["best"]).split(" assumed ")[1]
    assert "no other program" in assumed
    assert "data-sheet speed" in assumed or "speed taken from the data sheet" in assumed
    assert "data never repeat" in assumed


def screen(*words: str) -> str:
    return " ".join(foretrain("plan", *words).stdout.split())


def test_the_verdict_is_one_sentence() -> None:
    shown = screen(*SCREENS["fits"])
    assert "Fits. Peak 6.05 GiB (5.83–6.79) of 9.70 GiB free, in the backward pass." in shown
    assert "Other programs use 1.86 GiB." in shown
    assert "51.7 h (38.8–64.6): 19,073 steps of 9.74 s" in shown
    assert "nanoGPT" not in shown  # whose step has the same verdict, and nobody asked


def test_other_trainers_step_is_named_if_its_verdict_differs() -> None:
    """A nanoGPT file is nanoGPT's; foretrain's step is said beside it, and the other way round."""
    theirs = screen(*SCREENS["a nanoGPT file"])
    assert "Does not fit. Needs 10.84 GiB" in theirs
    assert "With foretrain's own step it would fit and need 7.82 GiB." in theirs
    ours = screen(*SCREENS["a nanoGPT file"], "--trainer", "foretrain")
    assert "With nanoGPT's own train.py it would not fit: that needs 10.84 GiB." in ours
    assert "With foretrain's own step it would need 6.32 GiB." in screen(*SCREENS["step time and rent"])
    assert "python train.py" in screen(*SCREENS["step time and rent"])
    assert "own step" not in screen(CASE_C, "--gpu", "4070", "--used-by-others", "8GB")  # which does not fit either


def test_the_chosen_batch_is_on_the_screen() -> None:
    assert "batch 16 × 32 accumulation, the largest that fits (32 needs 17.66 GiB)" in screen(*SCREENS["auto"])


def test_the_title_says_where_the_time_that_is_shown_comes_from() -> None:
    """The time of a step as given is not that of the suggested change, which is estimated."""
    changed = screen("gpt2-774m", "--gpu", "4070", "--step-time", "60")
    assert "with the change below" in changed
    assert "estimated, not measured" in changed
    assert "--step-time" not in changed.split("Does not fit.")[0]
    assert "time from --step-time" in screen("gpt2-124m", "--gpu", "4070", "--step-time", "10")
    as_given = screen("gpt2-xl", "--gpu", "3060", "--used-by-others", "8GiB", "--step-time", "200")
    assert "if it fitted" in as_given
    assert "time from --step-time" in as_given


def test_the_next_command_makes_it_fit() -> None:
    """What the screen offers is planned again: it fits."""
    shown = screen(*SCREENS["does not fit"])
    command = re.search(r"foretrain train (.+?) assumed", shown)
    again = foretrain("plan", *shlex.split(command[1].replace("\\", "")), "--gpu", "4070", "--check")
    assert again.returncode == 0, again.stdout


def test_what_was_assumed_is_said() -> None:
    assert "no other program uses the GPU" in screen(*SCREENS["auto"])
    assert "no other program" not in screen(*SCREENS["fits"])
    assert "vocab_size = 50,304" in screen(*SCREENS["a nanoGPT file"])


def test_full_prints_everything_and_quiet_no_hints() -> None:
    words = SCREENS["fits"]
    full = foretrain("plan", *words, "--full").stdout
    assert len(full.splitlines()) > 60
    assert "Where the bytes are" in full
    quiet = foretrain("plan", *words, "--quiet").stdout
    assert "Fits." in quiet
    assert "next" not in quiet
    assert "--full" not in quiet
    plain, long = (foretrain("plan", *words, "--json", *more).stdout for more in ((), ("--full",)))
    assert json.loads(plain) == json.loads(long)


@pytest.mark.parametrize(
    ("id", "said"),
    [
        ("fits", "gpt2-124m on RTX 4070: 6.1 of 9.7 GiB, 52 h (39-65), 3.0 EUR (estimated by foretrain "),
        ("does not fit", "gpt2-774m on RTX 4070: does not fit, needs 19 of 12 GiB (estimated by foretrain "),
        ("within", "gpt2-124m on RTX 4070: 6.1 of 12 GiB, 4,423 steps, 12 h (9.0-15), 0.70 EUR (estimated by "),
        ("eval_only", "gpt2-124m on RTX 4070: 1.8 of 12 GiB, 44 s (22-83), under 0.01 EUR (estimated by foretrain "),
        ("best", "20h on RTX 4070: 11 layers, 12 heads, width 768"),
    ],
)  # fmt: skip
def test_one_line_to_paste(id: str, said: str) -> None:
    result = foretrain("plan", *SCREENS[id], "--oneline")
    assert result.stdout.startswith(said)
    assert result.stdout.count("\n") == 1


@pytest.mark.parametrize("words", [["--oneline", "--json"], ["--oneline", "--full"], ["--oneline", "--explain"]])
def test_one_form_at_a_time(words: list[str]) -> None:
    foretrain("plan", *SCREENS["fits"], *words, code=2, says="--oneline")


def test_many_cards_stay_a_dozen_lines() -> None:
    shown = foretrain("plan", "gpt2-124m", "--gpu", "3060,4060,4070,4080,4090,A100-SXM4-80GB,T4").stdout
    assert len(shown.splitlines()) <= 12
    assert "2 more: --full" in shown


@pytest.mark.parametrize("lang", ["ar", "hi"])
@pytest.mark.parametrize("id", ["fits", "cards", "within"])
def test_every_language_answers_as_shortly(id: str, lang: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert len(foretrain("plan", *SCREENS[id], "--lang", lang).stdout.splitlines()) <= 12


# -- the parts -----------------------------------------------------------------------------------------------------


def made(*words: str, gpu: str = "RTX 4070") -> Plan:
    return plan(resolve(list(words)).config, find(gpu), name="run")


def test_what_limits_follows_the_operations() -> None:
    def limit(found: Plan) -> str:
        slow = bottleneck(StepSpec.of(found.config, found.gpu, dtype=found.dtype, compiled=found.compiled))
        assert 0 < slow.share <= 1
        return slow.limit

    assert limit(made("gpt2-124m")) == "arithmetic"
    small = ("shakespeare-char", "--n_embd=64", "--n_head=2", "--batch_size=1", "--compile=false")
    assert limit(made(*small, "--cuda_graph=off")) == "launches"
    assert limit(made(*small)) == "bandwidth"
    narrow = made("gpt2-124m", "--n_embd=128", "--n_head=2", "--vocab_size=256", "--batch_size=64", "--compile=false")
    assert limit(narrow) == "bandwidth"


def test_a_setting_of_the_users_own_is_replaced() -> None:
    words = ("c.py", "--batch-size", "8", "--compile", "--batch_size=4", "--n_layer=2")
    assert WORDS.without(words, ["batch_size"]) == ("c.py", "--compile", "--n_layer=2")


def test_rows_go_before_the_screen_grows() -> None:
    rows = [
        Row(Message("first.label.next"), "x " * 400, optional=2),
        Row(Message("first.label.more"), "gone", optional=3),
    ]
    command = ("foretrain", "train", "a b.py", *(f"--k{i}=1" for i in range(20)))
    rows += [Row(Message("first.label.next"), command=command)]
    console = Console(file=io.StringIO(), width=60)
    text.render_screen(Screen(Message("first.said", {"text": "t"}), (), None, tuple(rows)), console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "gone" not in shown
    assert "x x" not in shown
    assert shlex.split(shown.split("next")[1].replace("\\\n", " ")) == list(command)


def test_rows_become_short_before_others_go() -> None:
    rows = (
        Row(Message("first.label.assumed"), "long " * 60, short="brief"),
        Row(Message("first.label.more"), "kept", optional=3),
    )
    for lines, long, more in ((12, True, True), (3, False, True), (2, False, False)):
        console = Console(file=io.StringIO(), width=60)
        text.render_screen(Screen(Message("first.said", {"text": "t"}), (), None, rows, lines), console)
        shown = console.file.getvalue()  # type: ignore[attr-defined]
        assert ("long" in shown, "brief" in shown, "kept" in shown) == (long, not long, more)


def test_formats_of_ranges() -> None:
    assert format_value((5.78 * GIB, 6 * GIB, 6.74 * GIB), "bytes_span") == "6.00 GiB (5.78–6.74)"
    assert format_value((147960.0, 197280.0, 306000.0), "duration_span") == "54.8 h (41.1–85.0)"
    assert format_value((2.0, 2.0, 2.0), "duration_span") == "2 s"
    assert format_value((147960.0, 197280.0, 306000.0), "rough_duration_span") == "55 h (41-85)"
    assert format_value((1.85, 3.19, 5.3, "EUR"), "money_span") == "3.19 EUR (1.85–5.30)"
    assert format_value((0.0001, 0.0002, 0.0003, "EUR"), "money_span") == "under 0.01 EUR"
    assert format_value(0.00018, "money") == "under 0.01"
    assert [format_rough(x) for x in (0, 0.0123, 6, 12.2, 104, 1290)] == ["0", "0.012", "6.0", "12", "100", "1,300"]
    with speaking("ar"):
        assert "0.01" in format_value(0.002, "money")


# -- what --explain says -------------------------------------------------------------------------------------------


def test_terms_of_a_formula_are_gathered() -> None:
    long = "12 × 8·B·T·C + 13 × 4·B·T·C + 13 × 4·B·T + 6 × 6·B·T·C + 4·T·C"
    assert gathered(long) == "184·B·T·C + 52·B·T + 4·T·C"
    assert gathered("3 × 2·B·T·V") == "3 × 2·B·T·V"


@pytest.mark.parametrize(
    ("op", "shape", "dtype", "forward", "role"),
    [
        ("mm", (8192, 50304), "float16", True, "logits"),
        ("triton_red_fused__log_softmax__log_softmax_backward_data", (16, 512, 50304), "float16", False, "returned_logits_gradient"),
        ("triton_red_fused__log_softmax__log_softmax_backward_data", (8192, 50304), "float16", False, "logits_gradient"),
        ("_log_softmax", (8192, 50304), "float32", True, "log_probabilities"),
        ("nll_loss_backward", (8192, 50304), "float32", False, "log_probabilities_gradient"),
    ],
)  # fmt: skip
def test_the_three_largest_tensors_of_case_a_have_a_name(
    op: str, shape: tuple[int, ...], dtype: str, forward: bool, role: str
) -> None:
    made = Allocation(0, 1, 0, None, "logits", "", op, "", shape, dtype)
    assert role_of(made, "logits", 384, forward=forward) == role
    assert has(f"tensor.{role}")


def test_no_text_leaves_its_plural_to_the_reader() -> None:
    assert [id for id, said in texts().items() if "(s)" in said] == []
    assert say("error.config.problems", count=1) == "1 problem in the configuration:"
    assert "18 figures differ" in say("log_finding.not_this_config", count=18)
    assert "1 figure differs" in say("log_finding.not_this_config", count=1)


@pytest.mark.parametrize(
    "words", [["--help"], ["plan", "--help"], ["gpus", "4070"], ["languages"], ["plan", "gpt2-124m", "--show-config"]]
)
def test_no_command_prints_trailing_blanks(words: list[str]) -> None:
    lines = foretrain(*words).stdout.splitlines()
    assert len(lines) > 3
    assert [line for line in lines if line != line.rstrip()] == []
