"""Knobs, limits, sources and messages of a configuration."""

import json
import math
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.base.errors import ConfigError, UserError
from foretrain.config.options import OPTIONS, RunConfig
from foretrain.config.presets import GPT2_SHAPES, PRESET_ALIASES, PRESETS
from foretrain.config.resolve import from_values, resolve, to_toml
from foretrain.model.step import learning_rate
from tests.kit.command import foretrain

# karpathy/nanoGPT train.py, as of its last version.
NANOGPT_DEFAULTS = {
    "out_dir": "out", "eval_interval": 2000, "log_interval": 1, "eval_iters": 200, "eval_only": False,
    "always_save_checkpoint": True, "init_from": "scratch", "wandb_log": False, "wandb_project": "owt",
    "wandb_run_name": "gpt2", "dataset": "openwebtext", "gradient_accumulation_steps": 40, "batch_size": 12,
    "block_size": 1024, "n_layer": 12, "n_head": 12, "n_embd": 768, "dropout": 0.0, "bias": False,
    "learning_rate": 6e-4, "max_iters": 600000, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, "grad_clip": 1.0,
    "decay_lr": True, "warmup_iters": 2000, "lr_decay_iters": 600000, "min_lr": 6e-5, "backend": "nccl",
    "compile": True,
}  # fmt: skip


def problems_of(*words: str) -> list[UserError]:
    with pytest.raises(ConfigError) as caught:
        resolve(list(words))
    return caught.value.problems


def test_nanogpts_knobs_have_nanogpts_names_and_defaults() -> None:
    config = RunConfig().model_dump()
    assert {key: config[key] for key in NANOGPT_DEFAULTS} == NANOGPT_DEFAULTS
    theirs = {knob.name for knob in OPTIONS.values() if not knob.ours}
    assert theirs == set(NANOGPT_DEFAULTS) | {"device", "dtype"}


def test_order_is_preset_then_files_then_overrides() -> None:
    Path("a.toml").write_text('preset = "gpt2-40m"\nbatch_size = 7\n[optimizer]\nbeta2 = 0.9\n')
    Path("b.py").write_text("batch_size = 2 * 4\nn_layer = 3\n")
    resolved = resolve(["gpt2-124m", "a.toml", "b.py", "--n_layer=5", "--bias", "--n_layer=6"])
    config, sources = resolved.config, resolved.sources
    assert (config.n_embd, config.batch_size, config.beta2, config.n_layer, config.bias) == (384, 8, 0.9, 6, True)
    assert sources["n_embd"] == "preset gpt2-40m"
    assert sources["beta2"] == "a.toml:4"
    assert sources["batch_size"] == "b.py:1"
    assert sources["n_layer"] == "--n_layer=6"
    assert resolved.name == "b"


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        # The forms of reference table 4.4: nanoGPT refuses most of these without saying why.
        (["--learning_rate=1", "--min_lr=0"], "learning_rate", 1.0),
        (["--learning_rate=1e-3"], "learning_rate", 1e-3),
        (["--grad_clip=0"], "grad_clip", 0.0),
        (["--batch_size=8.0"], "batch_size", 8),
        (["--gradient_accumulation_steps=5 * 8"], "gradient_accumulation_steps", 40),
        (["--compile=false"], "compile", False),
        (["--compile=0"], "compile", False),
        (["--compile=no"], "compile", False),
        (["--compile=True"], "compile", True),
        (["--no-compile"], "compile", False),
        (["--bias"], "bias", True),
        (["--bias", "true"], "bias", True),
        (["--batch_size", "8"], "batch_size", 8),
        (["--batch-size=8"], "batch_size", 8),
        (["--batch-size", "8"], "batch_size", 8),
        (["--out_dir=a=b"], "out_dir", "a=b"),
        (["--out_dir=123"], "out_dir", "123"),
        (["--gradient_checkpointing=True"], "activation_checkpointing", True),
        (["--dtype=float16"], "dtype", "float16"),
        (["--dataset_tokens=3.68e9"], "dataset_tokens", 3_680_000_000),
        (["--memory_limit=10GiB"], "memory_limit", "10GiB"),
    ],
)
def test_override_forms(words: list[str], key: str, value: object) -> None:
    found = getattr(resolve(words).config, key)
    assert found == value
    assert type(found) is type(value)


def test_a_switch_does_not_swallow_a_file() -> None:
    Path("c.toml").write_text("n_layer = 3\n")
    config = resolve(["--bias", "c.toml"]).config
    assert config.bias
    assert config.n_layer == 3


def test_unknown_key_names_the_nearest() -> None:
    (problem,) = problems_of("--batchsize=8")
    assert problem.id == "config.unknown_key_near"
    assert problem.values["near"][0] == "batch_size"
    assert "did you mean batch_size" in str(problem)


def test_nanochat_dials_are_explained_not_mapped() -> None:
    (problem,) = problems_of("--depth=12")
    assert problem.id == "config.nanochat_key"
    assert "n_layer" in str(problem)


def test_unknown_preset_and_missing_file() -> None:
    assert problems_of("gpt2-124")[0].id == "config.unknown_source_near"
    assert problems_of("absent.toml")[0].id == "config.cannot_read"
    assert problems_of("run.yaml")[0].id.startswith("config.unknown_source")


@pytest.mark.parametrize(
    ("word", "id"),
    [
        # Every row of the failure catalogue's B.5 that is a value: none may be taken in silence.
        ("--block_size=0", "bad_value"),
        ("--eval_iters=0", "bad_value"),
        ("--eval_interval=0", "bad_value"),
        ("--max_iters=-1", "bad_value"),
        ("--batch_size=-3", "bad_value"),
        ("--batch_size=8.5", "bad_value"),
        ("--batch_size=eight", "bad_value"),
        ("--batch_size=True", "bad_value"),
        ("--batch_size=" + "9" * 50, "bad_value"),
        ("--batch_size=1e309", "bad_value"),
        ("--weight_decay=1e9", "bad_value"),
        ("--learning_rate=0", "bad_value"),
        ("--learning_rate=nan", "bad_value"),
        ("--learning_rate=inf", "bad_value"),
        ("--learning_rate=1e309", "bad_value"),
        ("--dropout=1", "bad_value"),
        ("--beta2=1.0", "bad_value"),
        ("--dtype=fp16", "bad_value_near"),
        ("--device=tpu", "bad_value"),
        ("--init_from=gpt3", "bad_value"),
        ("--compile=maybe", "bad_value"),
        ("--price_per_kwh=-1", "bad_value"),
        ("--memory_limit=lots", "bad_size"),
        ("--n_head=7", "heads_do_not_divide"),
        ("--eval_block_size=2048", "eval_block_beyond"),
    ],
)
def test_impossible_values_are_refused(word: str, id: str) -> None:
    problems = problems_of(word)
    assert f"config.{id}" in {problem.id for problem in problems}
    text = str(problems[0])
    key = word[2:].split("=")[0]
    assert key in text
    assert len(text) < 400
    assert word in text  # where it came from


@pytest.mark.parametrize(
    ("words", "ids"),
    [
        (["--max_iters=50", "--warmup_iters=100"], ["warmup_beyond_end"]),
        (["--max_iters=1", "--warmup_iters=5"], ["warmup_beyond_end"]),
        (["--lr_decay_iters=100"], ["decay_before_warmup"]),
        (["--lr_decay_iters=2000"], ["decay_at_warmup"]),
        (["--learning_rate=1e-5"], ["min_lr_above"]),
        (["--max_iters=50", "--decay_lr=false"], []),
    ],
)
def test_a_schedule_that_nanogpt_runs_is_noted_and_never_refused(words: list[str], ids: list[str]) -> None:
    found = resolve(words)
    assert [note.id for note in found.notes] == [f"config.{id}" for id in ids]
    for step in (0, 1, 49, found.config.max_iters):
        assert 0 < learning_rate(found.config, step) <= 6e-4
    foretrain("plan", *words, "--gpu", "4070", "--json", code=0)
    assert foretrain("mfu", *words, "--gpu", "4070", "--step-time", "4").returncode == 0


def test_all_problems_at_once_with_key_value_range_and_source() -> None:
    Path("bad.py").write_text("batch_size = 0\nblok_size = 4\nn_head = 5\n")
    with pytest.raises(ConfigError) as caught:
        resolve(["bad.py", "--dropout=2", "--nonsense=1"])
    text = str(caught.value)
    for part in (
        "bad.py:1",
        "batch_size = 0",
        "a whole number from 1 to",
        "bad.py:2",
        "block_size",
        "n_head = 5",
        "--dropout=2",
        "nonsense",
    ):
        assert part in text, part
    assert len(caught.value.problems) == 5


def test_a_rule_is_not_applied_to_values_that_are_wrong_already() -> None:
    assert {p.id for p in problems_of("--n_head=0")} == {"config.bad_value"}


def test_evaluation_only_needs_no_schedule() -> None:
    assert resolve(["--eval_only=True", "--max_iters=1"]).config.eval_only


def test_toml_problems() -> None:
    cases = {
        "n_layer = 1\nn_layer = 2\n": "not_toml",  # duplicate keys
        "n_layer = \n": "not_toml",
        "x = [" * 500: "not_toml",
        "[model]\nn_layers = 3\n": "unknown_key_near",
        'n_layer = "many"\n': "bad_value",
        "[strange]\nn_layer = 3\n": "unknown_key",
    }
    for number, (text, id) in enumerate(cases.items()):
        path = Path(f"{number}.toml")
        path.write_text(text)
        assert problems_of(str(path))[0].id.startswith(f"config.{id}"), text
    Path("binary.toml").write_bytes(b"\xff\xfe\x00")
    assert problems_of("binary.toml")[0].id == "config.not_text"
    Path("large.toml").write_text("# " + "x" * 70_000)
    assert problems_of("large.toml")[0].id == "config.file_too_large"
    Path("folder.toml").mkdir()
    assert problems_of("folder.toml")[0].id == "config.cannot_read"


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_valid(preset: str) -> None:
    assert resolve([preset]).name == preset


@pytest.mark.parametrize("preset", PRESETS)
def test_toml_round_trip(preset: str) -> None:
    config = resolve([preset]).config
    Path("x.toml").write_text(to_toml(config), "utf-8")
    assert resolve(["x.toml"]).config == config


@given(st.text(max_size=30).filter(lambda s: s < "\ud800" or s.isascii()))
def test_any_text_survives_toml(text: str) -> None:
    import tomllib

    config = RunConfig(wandb_project=text)
    assert tomllib.loads(to_toml(config))["run"]["wandb_project"] == text


def test_init_from_gpt2_takes_its_shape() -> None:
    config = resolve(["--init_from=gpt2-xl", "--n_layer=2", "--eval_only=True"]).config
    assert (config.n_layer, config.n_head, config.n_embd, config.vocab_size, config.bias) == (48, 25, 1600, 50257, True)


_values = st.one_of(
    st.integers(), st.floats(), st.booleans(), st.none(), st.text(max_size=20), st.lists(st.integers(), max_size=2)
)


@given(st.dictionaries(st.sampled_from([*OPTIONS, "no_such"]), _values, max_size=6))
def test_any_values_give_a_config_or_sentences(values: dict[str, object]) -> None:
    """No traceback, and nothing that is accepted is outside of its own limits."""
    try:
        config = from_values(values).config
    except ConfigError as error:
        assert error.problems
        assert all(len(str(problem)) < 600 for problem in error.problems)
    else:
        assert RunConfig.model_validate(config.model_dump()) == config
        assert config.n_embd % config.n_head == 0
        assert math.isfinite(config.learning_rate)


@pytest.mark.fault(
    "wrong types, unknown keys, values that cannot be", row="B.5",
    sees="exit code 2, all problems at once",
    safe="everything: torch is not even imported",
)  # fmt: skip
@given(st.lists(st.text(max_size=25), max_size=4))
def test_any_words_give_a_config_or_sentences(words: list[str]) -> None:
    try:
        resolve(words)
    except ConfigError as error:
        assert error.problems


def test_all_problems_of_a_config_are_said_at_once() -> None:
    foretrain("train", "--block_size=0", "--batchsize=3", code=2, says="2 problems in the configuration:")


def test_show_config_names_every_source() -> None:
    result = foretrain("plan", "gpt2-40m", "--batch_size=3", "--show-config", "--json")
    shown = json.loads(result.stdout)
    assert shown["schema"] == "foretrain.plan/1#config"
    assert shown["sources"]["batch_size"] == "--batch_size=3"
    assert shown["sources"]["n_embd"] == "preset gpt2-40m"
    assert shown["sources"]["bias"] == "default"
    assert set(shown["config"]) == set(OPTIONS)


def test_a_byte_order_mark_is_no_problem() -> None:
    Path("a.toml").write_text("\ufeffbatch_size = 3\n")
    Path("b.py").write_text("\ufeffblock_size = 64\n")
    config = resolve(["a.toml", "b.py"]).config
    assert (config.batch_size, config.block_size) == (3, 64)


def test_what_is_no_file_is_not_waited_for() -> None:
    os.mkfifo("fifo.py")
    Path("zero.py").symlink_to("/dev/zero")
    for name in ("fifo.py", "zero.py"):
        assert problems_of(name)[0].id == "config.cannot_read"


def test_a_preset_key_names_a_preset_not_a_file() -> None:
    Path("p.toml").write_text('preset = "p.toml"\n')
    assert problems_of("p.toml")[0].id == "config.unknown_preset"
    Path("q.toml").write_text('preset = "baby"\n')
    assert resolve(["q.toml"]).config.n_layer == resolve(["baby"]).config.n_layer


def test_init_from_says_what_it_overrules() -> None:
    notes = resolve(["--init_from=gpt2", "--n_layer=3"]).notes
    assert [note.values["key"] for note in notes] == ["n_layer"]


@pytest.mark.parametrize(
    ("words", "unread"),
    [(["--decay_lr=false", "--min_lr=0.1"], ["min_lr"]), (["--decay_lr=true", "--min_lr=0.1"], []),
     (["--muon_momentum=0.9"], ["muon_momentum"]), (["--muon_momentum=0.9", "--optimizer=muon"], []),
     (["--decay_lr=false", "--warmup_iters=5", "--cooldown=0.2"], ["cooldown", "warmup_iters"]),
     (["gpt2-124m", "--decay_lr=false"], [])],
)  # fmt: skip
def test_a_value_that_another_option_makes_idle_is_said(words: list[str], unread: list[str]) -> None:
    """But not those of a preset, which nobody wrote."""
    assert [note.values["key"] for note in resolve(words).notes if note.id == "config.unused"] == unread


@pytest.mark.parametrize("name", GPT2_SHAPES)
def test_the_names_that_everybody_knows_are_presets(name: str) -> None:
    found = resolve([name.upper(), "--batch_size=1"])
    assert found.config == resolve([PRESET_ALIASES[name], "--batch_size=1"]).config
    assert {key: getattr(found.config, key) for key in GPT2_SHAPES[name]} == GPT2_SHAPES[name]
    assert json.loads(foretrain("plan", name, "--gpu", "H200", "--json").stdout)["name"] == PRESET_ALIASES[name]


def said(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(words)
    return str(caught.value)


def test_near_names_are_offered() -> None:
    assert "gpt2-xl" in said("gpt2-xll")
    assert "gpt2-medium" in said("gpt2-medum")
    assert "--help" in said("--hlep")
    assert "--help" in said("--hepl")
    assert "--help" not in said("--depht")


def test_an_address_is_shown_as_it_was_typed() -> None:
    address = "https://github.com/karpathy/nanoGPT/blob/master/config/train_gpt2.py"
    assert address in said(address)
    assert "https://github.com/karpathy" in said("https://github.com/karpathy")


@pytest.mark.parametrize("name", ["own.toml", "own.py"])
def test_a_number_in_quotes_is_not_a_number(name: str) -> None:
    Path(name).write_text('n_layer = "6"\n')
    assert "n_layer = '6'" in said(name)
    assert f"{name}:1" in said(name)
    assert resolve(["--n_layer", "6"]).config.n_layer == 6


def test_an_option_that_is_typed_twice_is_noted() -> None:
    found = resolve(["baby", "--batch_size=8", "--batch_size=16"])
    assert found.config.batch_size == 16
    assert [note.id for note in found.notes] == ["config.typed_twice"]
    assert "--batch_size=16" in str(found.notes[0])
    assert not resolve(["baby", "--batch_size=8", "--batch_size=8"]).notes  # over a preset it is what one types it for


def test_a_search_ends_within_what_an_option_takes() -> None:
    searched = {name: option.largest[1] for name, option in OPTIONS.items() if option.largest}
    assert searched.keys() == {"n_layer", "block_size", "batch_size"}
    assert resolve([f"--{name}={most}" for name, most in searched.items() if name != "block_size"]).config
    assert resolve([f"--block_size={searched['block_size']}"]).config
