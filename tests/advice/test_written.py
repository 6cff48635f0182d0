"""Advice that can be followed: what is ranked first, what the first screen says, and what --write gives back."""

import json
import shlex
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from foretrain.advice.advisor import advise, short_list
from foretrain.advice.record import Advices
from foretrain.advice.rules import BY_ID
from foretrain.app.plan import Cards, make_plan
from foretrain.config import writer as config_writer
from foretrain.config.finetune import writer as trainer_file
from foretrain.config.finetune.read import settings_of
from foretrain.config.options import RunConfig
from foretrain.config.resolve import from_values, resolve
from foretrain.predict.plan import Plan
from tests.kit.command import REPO, first_screen, foretrain

FINETUNE = str(REPO / "examples" / "nanogpt" / "config" / "finetune_shakespeare.py")
CASE_C = REPO / "examples" / "real-cases" / "c.py"
CARD = ("--gpu", "4070", "--used-by-others", "2.1GB")


def planned(*words: str, gpu: str = "4070", others: str = "") -> Plan:
    resolved = resolve(words)
    return make_plan(resolved, Cards(gpu=gpu, others=others).targets(resolved.config)[0])


@cache
def finetune() -> Advices:
    return advise(planned(FINETUNE), "nanogpt")


def test_run_from_gpt2_xl_is_offered_the_largest_gpt2_that_fits() -> None:
    """As nanoGPT's README says for this very file."""
    found = finetune()
    smaller = next(a for a in found.advised if a.rules == ("pretrained",))
    changed = {s.option: s.after for s in smaller.settings}
    assert changed == {"init_from": "gpt2-medium", "n_layer": 24, "n_head": 16, "n_embd": 1024}
    assert smaller.exactness == "other model"
    assert smaller.step == "nanogpt"
    again = planned(FINETUNE, "--init_from=gpt2-medium")
    assert again.verdict_of("nanogpt") == "fits"
    assert again.memory_of("nanogpt").needed_bytes == smaller.effect.needed_bytes
    assert planned(FINETUNE, "--init_from=gpt2-large").verdict_of("nanogpt") == "does_not_fit"


def test_another_card_is_last_where_something_fits_on_this_one() -> None:
    found = finetune()
    cards = [a.gpu != found.gpu for a in found.advised]
    assert any(cards)
    assert cards == sorted(cards)
    assert not cards[0]


def test_the_short_list_of_a_plan_has_the_smaller_gpt2() -> None:
    found = short_list(planned(FINETUNE), "nanogpt")
    assert ("pretrained",) in [a.rules for a in found.advised]


def test_only_a_run_that_starts_from_gpt2_has_smaller_ones() -> None:
    from foretrain.advice.advisor import start_of

    rule = BY_ID["pretrained"]
    names = {word: [c.options["init_from"] for c in rule.changes(start_of(planned("gpt2-124m", word), "foretrain"))]
             for word in ("--init_from=gpt2-large", "--init_from=gpt2", "--init_from=scratch")}  # fmt: skip
    assert names == {
        "--init_from=gpt2-large": ["gpt2-medium", "gpt2"], "--init_from=gpt2": [], "--init_from=scratch": [],
    }  # fmt: skip


# -- what --write gives back ---------------------------------------------------------------------------------------


def number_of(*rules: str, words: tuple[str, ...] = (str(CASE_C), *CARD)) -> str:
    listed = json.loads(foretrain("advise", *words, "--json").stdout)["advised"]
    return next(str(i) for i, advice in enumerate(listed, 1) if advice["rules"] == list(rules))


def test_written_nanogpt_file_keeps_its_comments_and_fits() -> None:
    Path("mine.py").write_text("# my run\n" + CASE_C.read_text() + "eval_interval = 500  # often\n")
    words = ("mine.py", *CARD)
    apply = ("--apply", number_of("micro_batch", words=words), "--write", "new.py")
    result = foretrain("advise", *words, *apply)
    assert result.returncode == 0, result.stderr
    text = Path("new.py").read_text()
    assert "# my run\n" in text
    assert "eval_interval = 500  # often" in text
    assert "foretrain advise mine.py --gpu 4070" in text.splitlines()[0]
    assert "batch_size: was 16" in text
    before, after = resolve(["mine.py"]).config, resolve(["new.py"]).config
    differ = {name for name in RunConfig.model_fields if getattr(before, name) != getattr(after, name)}
    assert differ == {"batch_size", "gradient_accumulation_steps", "eval_iters"}
    assert foretrain("plan", "new.py", *CARD, "--check").returncode == 0
    assert foretrain("plan", "mine.py", *CARD, "--check").returncode == 3


def test_what_was_typed_beside_the_file_is_in_it() -> None:
    words = (str(CASE_C), "--max_iters=1234", "--price_per_kwh=0.5", *CARD)
    result = foretrain("advise", *words, "--apply", number_of("micro_batch", words=words), "--write", "new.py")
    assert result.returncode == 0, result.stderr
    assert resolve(["new.py"]).config.max_iters == 1234
    assert "price_per_kwh" not in Path("new.py").read_text().partition("\n")[2]


def test_foretrain_step_gets_a_command_and_no_nanogpt_file() -> None:
    result = foretrain("advise", str(CASE_C), *CARD, "--apply", number_of("foretrain_step"), "--write", "new.py")
    assert result.returncode == 2
    assert not Path("new.py").exists()
    assert f"foretrain train {CASE_C}" in result.stderr
    assert "nothing was written" in result.stderr


def test_foretrain_step_as_toml_is_a_config_that_trains() -> None:
    result = foretrain("advise", str(CASE_C), *CARD, "--apply", number_of("foretrain_step"), "--write", "new.toml")
    assert result.returncode == 0, result.stderr
    assert foretrain("plan", "new.toml", *CARD, "--check").returncode == 0


def test_what_is_not_in_the_config_is_not_written() -> None:
    card = foretrain("advise", FINETUNE, "--gpu", "4070", "--apply", number_of(
        "another_card", words=(FINETUNE, "--gpu", "4070")), "--write", "ft.toml")  # fmt: skip
    words = (str(CASE_C), "--batch_size=15", *CARD)
    free = foretrain("advise", *words, "--apply", number_of("free_others", words=words), "--write", "ft.py")
    assert (card.returncode, free.returncode) == (2, 2)
    assert "another card" in card.stderr
    assert "close what nvidia-smi lists" in free.stderr
    assert not list(Path().iterdir())


def test_a_smaller_gpt2_is_written_as_init_from_alone() -> None:
    words = (FINETUNE, "--gpu", "4070")
    result = foretrain("advise", *words, "--apply", number_of("pretrained", words=words), "--write", "ft.py")
    assert result.returncode == 0, result.stderr
    text = Path("ft.py").read_text()
    assert "init_from = 'gpt2-medium'" in text
    assert "n_layer" not in text
    assert foretrain("plan", "ft.py", "--gpu", "4070", "--check").returncode == 0


def test_written_config_that_alone_does_not_fit_ends_with_3() -> None:
    """The change and less memory used by other programs: the file alone does not fit the card as it was asked about."""
    from foretrain.advice.asked import Asked
    from foretrain.advice.record import Advice, Setting
    from foretrain.cli.advising import write_changed

    resolved, base = resolve([str(CASE_C)]), planned(str(CASE_C), others="9GB")
    found = advise(base, "nanogpt", "fit")
    fewer = Setting(option="eval_iters", before=base.config.eval_iters, after=100, ours=False)
    advice = Advice.model_validate({
        **found.advised[0].model_dump(), "settings": (fewer,), "step": "nanogpt",
        "gpu": base.gpu.name, "used_by_others_bytes": 0,
    })  # fmt: skip
    found = found.model_copy(update={"advised": (advice,)})
    asked = Asked(command="advise", words=(str(CASE_C),), quiet=True)
    problem = write_changed(resolved, base, found, 1, Path("new.py"), asked)
    assert problem.exit_code == 3
    assert "new.py was written, but" in str(problem)
    assert resolve(["new.py"]).config.eval_iters == 100


@pytest.mark.parametrize(
    ("text", "changes", "expected"),
    [
        ("a = 1\nbatch_size = (\n  4 *\n  2)  # é\n", {"batch_size": 4}, "a = 1\nbatch_size = (\n  4)  # é\n"),
        ("x = 'é'; batch_size = 8; max_iters = 5\r\n", {"batch_size": 4}, "x = 'é'; batch_size = 4; max_iters = 5\r\n"),
        ("batch_size = 8\nbatch_size = 6\n", {"batch_size": 4}, "batch_size = 8\nbatch_size = 4\n"),
        ("dropout: float = 0.1", {"dropout": 0.0, "compile": False}, "dropout: float = 0.0\ncompile = False\n"),
        # A line computes another option from it: both keep their values but for the one that is changed.
        ("max_iters = 9\nlr_decay_iters = max_iters\n", {"max_iters": 5},
         "max_iters = 9\nlr_decay_iters = max_iters\nmax_iters = 5\n"),
        ("import os\n", {"batch_size": 4}, "import os\nbatch_size = 4\n"),
    ],
)  # fmt: skip
def test_values_are_changed_in_their_lines(text: str, changes: dict[str, object], expected: str) -> None:
    assert config_writer.nanogpt_text(text, changes, ["by\nme"]) == "# by me\n" + expected


def test_written_toml_holds_what_differs_and_names_the_changes() -> None:
    Path("my.toml").write_text("batch_size = 32\ngradient_accumulation_steps = 16\ncompile = true\n")
    words = ("my.toml", "--gpu", "4060", "--used-by-others", "2.3GB")
    listed = json.loads(foretrain("advise", *words, "--goal", "fit", "--json").stdout)["advised"]
    number, advice = next((i, a) for i, a in enumerate(listed, 1) if a["settings"] and a["gpu"] == "RTX 4060")
    result = foretrain("advise", *words, "--goal", "fit", "--apply", str(number), "--write", "new.toml")
    assert result.returncode == 0, result.stderr
    text = Path("new.toml").read_text()
    options = {name for group in tomllib.loads(text).values() for name in group}
    changed = {setting["option"] for setting in advice["settings"]}
    assert changed <= options <= changed | {"batch_size", "gradient_accumulation_steps"}
    assert text.startswith("# Written by foretrain")
    assert text.count("# was ") == len(changed)
    config = resolve(["my.toml"]).config.model_copy(update={s["option"]: s["after"] for s in advice["settings"]})
    assert resolve(["new.toml"]).config == config


@pytest.mark.parametrize(
    "values",
    [
        {}, {"recipe": "modern"}, {"recipe": "modern", "optimizer": "adamw", "learning_rate": 6e-4},
        {"init_from": "gpt2-xl"}, {"init_from": "gpt2", "vocab_size": 50304, "block_size": 512},
        {"n_layer": 3, "dataset": 'a"b', "decay_lr": False}, {"total_batch_size": 524288, "batch_size": 8},
    ],
)  # fmt: skip
def test_short_toml_reads_back_as_the_same_config(values: dict[str, object]) -> None:
    config = from_values(dict(values)).config
    Path("a.toml").write_text(config_writer.short_toml(config, ["x"]))
    assert resolve(["a.toml"]).config == config


def test_python_is_for_those_who_came_with_it() -> None:
    result = foretrain("advise", "gpt2-30m", "--batch_size=256", "--gpu", "4070", "--apply", "1", "--write", "new.py")
    assert result.returncode == 2
    assert ".toml" in result.stderr
    assert not Path("new.py").exists()


# -- the first screen ----------------------------------------------------------------------------------------------

SCREENS = {
    "a nanoGPT file": ("examples/real-cases/c.py", *CARD),
    "fine-tuning gpt2-xl": ("examples/nanogpt/config/finetune_shakespeare.py", "--gpu", "4070"),
    "several changes": ("gpt2-774m", "--gpu", "3060", "--used-by-others", "1GiB"),
    "speed": ("gpt2-124m", "--gpu", "4090", "--compile=false"), "cpu": ("baby", "--gpu", "cpu"),
}  # fmt: skip


@pytest.mark.parametrize("words", SCREENS.values(), ids=SCREENS)
def test_first_screen_says_what_fits_and_what_to_type(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    result = first_screen("advise", *words, most_lines=15)
    lines = result.stdout.splitlines()
    monkeypatch.chdir(REPO)
    assert any(word in result.stdout for word in ("Fits.", "Tight.", "Does not fit."))
    assert "What does not help here" not in result.stdout
    if any(line.split()[:1] == ["1"] for line in lines):
        assert {"verdict", "learning", "change"} <= set(result.stdout.split())
        assert any(line.startswith("  next  ") for line in lines)
    assert "What does not help here" in foretrain("advise", *words, "--full").stdout


def test_next_command_runs_the_first_change() -> None:
    said = " ".join(foretrain("advise", str(CASE_C), *CARD).stdout.split())
    assert f"next foretrain train {CASE_C}" in said
    large = foretrain(
        "advise", "gpt2-30m", "--batch_size=256", "--gpu", "3060", "--top", "1", "--trainer", "nanogpt"
    ).stdout
    assert "does not fit" in large
    free = foretrain("advise", str(CASE_C), *CARD, "--top", "7").stdout
    assert "5  block_size 512" in free
    assert "6  RTX 4080 SUPER" in free


def test_first_screen_is_of_the_card_and_full_table_of_more() -> None:
    from foretrain.advice.asked import Asked
    from foretrain.reports.document import Quantity, Table
    from foretrain.reports.views import advice as advice_view

    base = planned(str(CASE_C), others="2.1GB")
    found = advise(base, "nanogpt")
    room = found.now.available_bytes
    beyond = found.advised[2].effect.model_copy(update={"needed_bytes": 2 * room, "verdict": "tight"})
    found = found.model_copy(update={"advised": (found.advised[2].model_copy(update={"effect": beyond}),)})
    table = advice_view.screen(base, found, Asked()).table
    full = next(b for b in advice_view.document(base, found).sections[1].blocks if isinstance(b, Table))
    assert Quantity(room, "bytes") in table.rows[0]
    assert Quantity(room, "bytes") in full.rows[0]


def test_what_saves_nothing_is_advised_only_where_it_gives_room() -> None:
    from foretrain.reports.views import advice as advice_view

    base = planned(str(CASE_C), others="2.1GB")
    found = advise(base, "nanogpt")
    for advice in found.advised:
        given = advice.gpu != found.gpu or advice.used_by_others_bytes < found.used_by_others_bytes
        saved = advice_view._saved(found, advice)
        assert (given and saved is None) or (saved is not None and saved > 0), advice.rules
    said = foretrain("advise", str(CASE_C), *CARD, "--full").stdout
    table = said.partition("What does not help")[0]
    assert " 0 B" not in table
    assert "-46" not in table


# -- fine-tuning, text, several cards --------------------------------------------------------------------------------

RECIPE = """# mine
model_name_or_path: HuggingFaceTB/SmolLM2-135M  # small
per_device_train_batch_size: 64  # large
max_length: 2048
use_peft: true
lora_r: 8
bf16: true
dataset_name: mine
"""
SECTIONS = """model: unsloth/Llama-3.2-1B-Instruct
data: {dataset: mine/data}
training:
  max_seq_length: 4096
  load_in_4bit: false
  batch_size: 8
lora: {lora_r: 32}
"""


@pytest.mark.parametrize(("name", "text", "lines"), [
    ("mine.yaml", RECIPE, {"per_device_train_batch_size: 1  # large", "gradient_accumulation_steps: 64"}),
    ("mine.json", '{"base_model": "HuggingFaceTB/SmolLM2-135M", "sequence_len": 2048, "micro_batch_size": 64,\n'
     ' "adapter": "lora", "lora_target_linear": true, "bf16": true}\n',
     {' "adapter": "lora", "lora_target_linear": true, "bf16": true, "lora_r": 4, "gradient_accumulation_steps": 64}'}),
])  # fmt: skip
def test_a_trainer_s_file_keeps_all_but_the_change(name: str, text: str, lines: set[str]) -> None:
    Path(name).write_text(text)
    words = ("advise", name, "--lora-r", "4", "--gpu", "3060")
    found = json.loads(foretrain(*words, "--json").stdout)["advised"]
    number, change = next((i, each) for i, each in enumerate(found, 1) if each["rules"] == ["batch_of_one"])
    written = Path(name).with_stem("new")
    result = foretrain(*words, "--apply", str(number), "--write", str(written))
    assert result.returncode == 0, result.stderr
    assert "--batch-size 1 --grad-accum 64" in result.stdout
    made = written.read_text()
    added = {line for line in made.splitlines() if line not in text.splitlines() and not line.startswith("# Written")}
    assert added >= lines
    assert len(added) <= 3
    plan = json.loads(foretrain("plan", str(written), "--gpu", "3060", "--json").stdout)
    needed = max(phase["needed_expected_bytes"] for phase in plan["memory"]["phases"])
    assert needed == change["effect"]["needed_bytes"]
    assert (plan["tune"]["lora_r"], plan["tune"]["batch_size"], plan["tune"]["grad_accum"]) == (4, 1, 64)
    again = foretrain(*words, "--apply", str(number), "--write", str(written))
    assert (again.returncode, written.read_text()) == (2, made)


def test_a_file_in_sections_is_changed_in_them_alone() -> None:
    changed = trainer_file.changed_text(SECTIONS, "mine.yaml", "unsloth", {"batch_size": 2, "lora_r": 16})
    assert changed == SECTIONS.replace("batch_size: 8", "batch_size: 2").replace("lora_r: 32", "lora_r: 16")
    assert trainer_file.changed_text(SECTIONS, "mine.yaml", "unsloth", {"grad_accum": 2}) is None
    shared = "micro_batch_size: &n 8\nsequence_len: 64\nsave_steps: *n\nbase_model: x\n"
    assert trainer_file.changed_text(shared, "mine.yaml", "axolotl", {"batch_size": 2}) is None


@pytest.mark.parametrize("options", [{"liger": True}, {"lora_targets": "q_proj,v_proj"}], ids=str)
def test_keys_of_axolotl_that_go_together_are_written(options: dict[str, Any]) -> None:
    text = "base_model: x\nadapter: lora\nlora_target_linear: true\nmicro_batch_size: 2\nsequence_len: 64\n"
    made = trainer_file.changed_text(text, "mine.yaml", "axolotl", options)
    assert made is not None
    found = settings_of(made, "mine.yaml", "axolotl", script=False)
    assert found.values.items() >= options.items()
    assert not found.unplanned


@pytest.mark.parametrize("words", [
    ("smollm2-135m", "--method=lora", "--batch-size=32", "--gpu", "3060"),
    ("llama-3.1-8b", "--inference", "--gpu", "4070"),
])  # fmt: skip
def test_a_run_of_words_gets_its_command_and_no_file(words: tuple[str, ...]) -> None:
    shown = foretrain("advise", *words, "--apply", "1")
    assert shown.returncode == 0, shown.stderr
    change = json.loads(foretrain("advise", *words, "--apply", "1", "--json").stdout)["advised"]
    assert len(change) == 1
    command = next(line.strip() for line in shown.stdout.splitlines() if line.startswith("  foretrain plan"))
    plan = json.loads(foretrain(*shlex.split(command)[1:], "--json").stdout)
    needed = max(phase["needed_expected_bytes"] for phase in plan["memory"]["phases"])
    assert needed == change[0]["effect"]["needed_bytes"]
    refused = foretrain("advise", *words, "--apply", "1", "--write", "new.yaml")
    assert (refused.returncode, command in refused.stderr) == (2, True)
    assert not list(Path().iterdir())


def test_a_change_on_several_cards_is_written_as_a_config() -> None:
    words = ("gpt2-30m", "--batch_size=8", "--compile=false", "--goal", "speed", "--gpus", "2 x RTX 3060 12GB")
    found = json.loads(foretrain("advise", *words, "--json").stdout)["advised"]
    number = next(i for i, each in enumerate(found, 1) if not each["shared"]["buys"] and each["settings"])
    result = foretrain("advise", *words, "--apply", str(number), "--write", "new.toml")
    assert result.returncode == 0, result.stderr
    plan = json.loads(foretrain("plan", "new.toml", *words[-2:], "--json").stdout)
    way = found[number - 1]["shared"]["way"]
    ways = [{"strategy": rank["strategy"], "holds_gradients": not rank["syncs_each"]} for rank in plan["ranks"]]
    best = plan["ranks"][ways.index(way)]
    needed = max(phase["needed_expected_bytes"] for phase in best["memory"]["phases"])
    assert needed == found[number - 1]["effect"]["needed_bytes"]
    more = next(i for i, each in enumerate(found, 1) if each["shared"]["buys"])
    refused = foretrain("advise", *words, "--apply", str(more), "--write", "more.toml")
    assert (refused.returncode, "nothing was written" in refused.stderr) == (2, True)
