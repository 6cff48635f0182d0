"""nanoGPT's config files are read, never run."""

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from foretrain.base.errors import ConfigError
from foretrain.config.finetune.read import is_asked
from foretrain.config.nanogpt_file import parse, parse_expression
from foretrain.config.options import OPTIONS
from foretrain.config.resolve import LEFT_OUT, NANOGPT_DEFAULTS, resolve
from tests.kit.command import REPO, foretrain

# The seven stock configs of karpathy/nanoGPT, as facts: which names they set to which values.
STOCK = {
    "eval_gpt2": "batch_size = 8\neval_iters = 500\neval_only = True\nwandb_log = False\ninit_from = 'gpt2'\n",
    "eval_gpt2_medium": "batch_size = 8\neval_iters = 500\neval_only = True\nwandb_log = False\ninit_from = 'gpt2-medium'\n",
    "eval_gpt2_large": "batch_size = 8\neval_iters = 500\neval_only = True\nwandb_log = False\ninit_from = 'gpt2-large'\n",
    "eval_gpt2_xl": "batch_size = 8\neval_iters = 500\neval_only = True\nwandb_log = False\ninit_from = 'gpt2-xl'\n",
    "finetune_shakespeare": (
        "import time\n\nout_dir = 'out-shakespeare'\neval_interval = 5\neval_iters = 40\nwandb_log = False\n"
        "wandb_project = 'shakespeare'\nwandb_run_name = 'ft-' + str(time.time())\n\ndataset = 'shakespeare'\n"
        "init_from = 'gpt2-xl'\n\nalways_save_checkpoint = False\n\nbatch_size = 1\n"
        "gradient_accumulation_steps = 32\nmax_iters = 20\n\nlearning_rate = 3e-5\ndecay_lr = False\n"
    ),
    "train_gpt2": (
        "wandb_log = True\nwandb_project = 'owt'\nwandb_run_name='gpt2-124M'\n\nbatch_size = 12\nblock_size = 1024\n"
        "gradient_accumulation_steps = 5 * 8\n\nmax_iters = 600000\nlr_decay_iters = 600000\n\neval_interval = 1000\n"
        "eval_iters = 200\nlog_interval = 10\n\nweight_decay = 1e-1\n"
    ),
    "train_shakespeare_char": (
        "out_dir = 'out-shakespeare-char'\neval_interval = 250\neval_iters = 200\nlog_interval = 10\n\n"
        "always_save_checkpoint = False\n\nwandb_log = False\nwandb_project = 'shakespeare-char'\n"
        "wandb_run_name = 'mini-gpt'\n\ndataset = 'shakespeare_char'\ngradient_accumulation_steps = 1\n"
        "batch_size = 64\nblock_size = 256\n\nn_layer = 6\nn_head = 6\nn_embd = 384\ndropout = 0.2\n\n"
        "learning_rate = 1e-3\nmax_iters = 5000\nlr_decay_iters = 5000\nmin_lr = 1e-4\nbeta2 = 0.99\n\n"
        "warmup_iters = 100\n"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STOCK)
def test_stock_configs_read_unchanged(name: str) -> None:
    Path(f"{name}.py").write_text(STOCK[name])
    resolved = resolve([f"{name}.py"])
    notes = {note.id for note in resolved.notes}
    if name == "finetune_shakespeare":
        assert notes == {"config.import_skipped", "config.skipped_value"}
        (skipped,) = [n for n in resolved.notes if n.id == "config.skipped_value"]
        assert "wandb_run_name" in str(skipped)
        assert ":8" in str(skipped)
        assert resolved.config.gradient_accumulation_steps == 32
    elif name == "train_gpt2":
        assert not notes
        assert resolved.config.wandb_log
        assert resolved.config.gradient_accumulation_steps == 40
    else:
        assert not notes


def read(text: str):
    return parse(text, "f.py", set(OPTIONS), LEFT_OUT)


def test_names_arithmetic_and_helpers() -> None:
    result = read(
        "total = 10e9\nper_step = 12 * 1024 * 40\nmax_iters = total // per_step\nlr_decay_iters = max_iters\n"
        "out_dir = 'out-' + 'x'\nmin_lr: float = 1e-4 / 2\nwarmup_iters = -(-7)\nbias = not False\n"
    )
    values = {s.key: s.value for s in result.settings}
    assert not result.problems
    assert values == {
        "max_iters": 20345.0, "lr_decay_iters": 20345.0, "out_dir": "out-x", "min_lr": 5e-5, "warmup_iters": 7,
        "bias": True,
    }  # fmt: skip


def test_a_misspelt_name_in_a_file_is_found() -> None:
    Path("m.py").write_text("bath_size = 4\n")
    with pytest.raises(ConfigError, match=r"did you mean batch_size"):
        resolve(["m.py"])


CANARY = "canary-was-here"
HOSTILE = [
    f"open({CANARY!r}, 'w')",
    f"batch_size = open({CANARY!r}, 'w')",
    f"__import__('os').system('touch {CANARY}')",
    f"exec(\"open('{CANARY}', 'w')\")",
    f"import os; os.system('touch {CANARY}')",
    f"batch_size = [open({CANARY!r}, 'w') for _ in 'x']",
    f"batch_size = (lambda: open({CANARY!r}, 'w'))()",
    f"def f(): open({CANARY!r}, 'w')\nf()",
    f"class A:\n    open({CANARY!r}, 'w')",
    f"@open({CANARY!r}, 'w')\ndef f(): ...",
    f"def f(x=open({CANARY!r}, 'w')): ...",
    f"with open({CANARY!r}, 'w') as batch_size: ...",
    f"for batch_size in open({CANARY!r}, 'w'): ...",
    f"if open({CANARY!r}, 'w'): ...",
    f"assert open({CANARY!r}, 'w')",
    f"raise open({CANARY!r}, 'w')",
    f"batch_size = f'{{open({CANARY!r}, \"w\")}}'",
    f"batch_size: open({CANARY!r}, 'w') = 8",
    f"(batch_size := open({CANARY!r}, 'w'))",
    f"batch_size = 4 if open({CANARY!r}, 'w') else 5",
    f"batch_size = {{open({CANARY!r}, 'w')}}",
    f"x.y = open({CANARY!r}, 'w')",
    f"x[open({CANARY!r}, 'w')] = 1",
    f"a, batch_size = open({CANARY!r}, 'w'), 2",
    f"batch_size += open({CANARY!r}, 'w')",
    f"del batch_size, x[open({CANARY!r}, 'w')]",
    f"try:\n    open({CANARY!r}, 'w')\nfinally: ...",
    f"match open({CANARY!r}, 'w'):\n    case _: ...",
    f"async def f(): open({CANARY!r}, 'w')",
    f"type X = open({CANARY!r}, 'w')",
    "from os import *\nbatch_size = system",
    "batch_size = ''.__class__.__mro__",
    "batch_size = 10 ** 10 ** 10",
    "batch_size = 9 ** 9 ** 9 ** 9",
    "batch_size = 'x' * 10 ** 9",
    "batch_size = 2 ** 65",
    "batch_size = 1 / 0",
    "batch_size = 1 % 0",
    "batch_size = (-8) ** 0.5",
    "batch_size = 0 ** -1",
    "batch_size = 1e308 * 1e308",
    "batch_size = 1 << 60",
    "batch_size = True + 1",
    "batch_size = None",
    "batch_size = ...",
    "batch_size = b'8'",
    "batch_size = 8j",
    "batch_size = undefined_name",
    "batch_size = " + "-" * 100_00 + "1",
    "batch_size = " + "(" * 300 + "1" + ")" * 300,
    "batch_size = " + "1+" * 20_000 + "1",
    "batch_size = " + "9" * 5000,
    "batch_size = 'unterminated",
    "\x00",
    "batch_size = 8\x00",
    "  batch_size = 8",
    "\ufeffbatch_size = 8",
    "batch_size == 8",
    "batch_size",
    "while True: pass",
    "pass\n" * 3 + "yield 3",
    "return 3",
    "global batch_size",
    "*batch_size, = 3",
    "# coding: no-such-codec\nbatch_size = 8",
    "x" * 70_000,
]


@pytest.mark.fault(
    "a config file that is a program", row="B.5",
    sees="exit code 2 with the line",
    safe="everything: it is parsed, never run",
)  # fmt: skip
@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_files_are_never_run(text: str) -> None:
    result = read(text)
    assert not Path(CANARY).exists()
    assert result.problems or all(s.value == 8 for s in result.settings)
    for problem in result.problems:
        assert "f.py" in str(problem)
        assert len(str(problem)) < 500


@given(st.text(max_size=200))
def test_any_text_is_read_without_a_traceback(text: str) -> None:
    read(text)
    parse_expression(text)


@given(st.recursive(
    st.integers(-10**6, 10**6).map(str) | st.floats(allow_nan=False, allow_infinity=False).map(repr),
    lambda inner: st.tuples(inner, st.sampled_from(["+", "-", "*", "/", "//", "%", "**"]), inner).map(
        lambda t: f"({t[0]} {t[1]} {t[2]})"
    ),
    max_leaves=8,
))  # fmt: skip
def test_arithmetic_is_pythons(text: str) -> None:
    """What is accepted has Python's own value."""
    value = parse_expression(text)
    if value != text:
        assert value == eval(text)


FIELD = REPO / "tests" / "data" / "field" / "configs"
# What running each file after nanoGPT's train.py sets, on a machine with a CUDA card.
READ = {
    "device_pick": {"warmup_iters": 250, "lr_decay_iters": 4950, "device": "cuda", "compile": True, "dtype": "bfloat16"},
    "on_base": {"n_layer": 4, "n_embd": 512, "block_size": 512, "out_dir": "out-variant", "compile": False},
    "print_line": {"n_embd": 384, "batch_size": 64, "block_size": 256},
    "odd2": {"max_iters": 5000, "lr_decay_iters": 5000},
    "odd5": {"n_embd": 384},
    "odd7": {"n_embd": 384},
    "short_schedule": {"max_iters": 2000, "lr_decay_iters": 2000, "warmup_iters": 2000},
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_a_forks_file_has_the_values_of_running_it(name: str) -> None:
    config = resolve([str(FIELD / f"{name}.py")]).config
    assert {key: getattr(config, key) for key in READ[name]} == READ[name]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("n_embd = 64 * n_head if n_head > 2 else 128\n", {"n_embd": 768}),
        ("size = 'm'\nn_layer, n_embd = {'s': (4, 128), 'm': (6, 384)}[size]\n", {"n_layer": 6, "n_embd": 384}),
        ("batch_size = 8\nbatch_size *= 2\n", {"batch_size": 16}),
        ("warmup_iters = min(100, max_iters // 10)\n", {"warmup_iters": 100}),
        ("if block_size >= 1024: batch_size = 4\nelse: batch_size = 9\n", {"batch_size": 4}),
        ("import os\nout_dir = os.path.join('runs', f'{n_layer}x{n_embd}')\n", {"out_dir": "runs/12x768"}),
        ("import math\nlr_decay_iters = math.ceil(1e9 / (12 * 1024 * 40))\n", {"lr_decay_iters": 2035}),
    ],
)
def test_what_needs_no_running_is_computed(text: str, values: dict[str, object]) -> None:
    result = read_with_defaults(text)
    assert not result.problems
    found = {setting.key: setting.value for setting in result.settings}
    assert found == values


def read_with_defaults(text: str):
    return parse(text, "f.py", set(OPTIONS), LEFT_OUT, NANOGPT_DEFAULTS)


def test_the_command_line_needs_no_value_in_the_file() -> None:
    Path("p.py").write_text("import os\nbatch_size = int(os.environ['B'])\nn_embd = width()\n")
    with pytest.raises(ConfigError, match=r"p\.py:2"):
        resolve(["p.py", "--n_embd=384"])
    assert resolve(["p.py", "--batch_size=4", "--n_embd=384"]).config.batch_size == 4


def test_a_statement_needs_no_values_that_the_command_line_gives() -> None:
    Path("p.py").write_text("n_layer, n_head = 1, 1\nfor _ in range(3):\n    n_layer += 1\n    n_head += 1\n")
    with pytest.raises(ConfigError, match=r"--key=value"):
        resolve(["p.py", "--n_layer=4"])
    assert resolve(["p.py", "--n_layer=4", "--n_head=4"]).config.n_head == 4
    Path("p.py").write_text("for name in names:\n    globals()[name] = 1\n")
    with pytest.raises(ConfigError) as caught:
        resolve(["p.py", "--n_layer=4"])
    assert [problem.id for problem in caught.value.problems] == ["config.sets_anything"]


def test_a_statement_that_sets_a_label_is_a_note() -> None:
    Path("p.py").write_text("n_layer = 3\ntry:\n    wandb_run_name += 'x'\nexcept Exception:\n    pass\n")
    resolved = resolve(["p.py"])
    assert [(note.id, note.values["key"]) for note in resolved.notes] == [("config.skipped_value", "wandb_run_name")]


def test_one_cause_is_told_once() -> None:
    Path("p.py").write_text("exec(open('not/here.py').read())\nn_embd = 64 * heads\n")
    with pytest.raises(ConfigError) as caught:
        resolve(["p.py"])
    assert [problem.values["source"] for problem in caught.value.problems] == ["p.py:1"]


@pytest.mark.parametrize(
    ("line", "id"),
    [
        ("use_flash = True", None), ("resume_dir = None", None), ("n_experts = 1", None), ("moe = False", None),
        ("n_experts = 8", "config.changes_model"), ("n_query_groups = 2", "config.changes_model"),
        ("d_model = 512", "config.changes_model"), ("batchsize = 4", "config.unknown_key_near"),
        ("n_layers = 4", "config.unknown_key_near"), ("use_swiglu = True", "config.changes_model"),
        ("llama_config_path = 'llama.json'", "config.changes_model"), ("block_type = None", None),
    ],
)  # fmt: skip
def test_a_key_of_the_forks_own(line: str, id: str | None) -> None:
    Path("p.py").write_text(f"n_embd = 384\n{line}\n")
    if id is None:
        resolved = resolve(["p.py", f"--{line.replace(' ', '')}"])
        assert [note.id for note in resolved.notes] == ["config.unread_keys"]
    else:
        with pytest.raises(ConfigError) as caught:
            resolve(["p.py"])
        assert [problem.id for problem in caught.value.problems] == [id]


@pytest.mark.parametrize("text", ["", "import os\n", "# nothing\nwandb_log = True\n"])
def test_a_file_that_sets_nothing_is_no_run(text: str) -> None:
    Path("p.py").write_text(text)
    result = foretrain("plan", "p.py", "--gpu", "4070", code=2)
    assert "sets none" in result.stderr
    assert resolve(["p.py", "--n_layer=2"]).config.n_layer == 2


def test_no_file_outside_is_read(tmp_path_factory: pytest.TempPathFactory) -> None:
    outside = tmp_path_factory.mktemp("outside") / "secret.py"
    outside.write_text("n_layer = 3\n")
    for name in (str(outside), "../" + outside.name):
        Path("p.py").write_text(f"exec(open({name!r}).read())\n")
        with pytest.raises(ConfigError, match="would have to be run"):
            resolve(["p.py"])


HYDRA = """
defaults: [_self_]
model: {n_layer: 6, n_head: 6, n_embd: 384}
train: {block_size: 256, learning_rate: 1e-3, gradient_accumulation_steps: 1, wandb_notes: null}
"""


@pytest.mark.parametrize("name", ["run.yaml", "run.json"])
def test_tables_with_nanogpt_keys_are_its_config(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(json.dumps(yaml.safe_load(HYDRA)) if name.endswith("json") else HYDRA)
    found = resolve([str(file)])
    words = ["--n_layer=6", "--n_head=6", "--n_embd=384", "--block_size=256", "--learning_rate=1e-3"]
    assert found.config == resolve([*words, "--gradient_accumulation_steps=1"]).config
    assert found.step == "nanogpt"
    assert [note.id for note in found.notes] == ["config.read_as_nanogpt", "config.unread_keys"]
    assert not is_asked([str(file)])


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ("other: {n_layer: 8}", "config.finetune_twice"), ("moe: {n_experts: 8}", "config.changes_model"),
        ("data: {block_size: [1, 2]}", "config.not_data"), ("n_layers: 3", "config.unknown_key_near"),
        ("a: !!python/object:os.system {}", "config.finetune_tag"), ("beta1: .nan", "config.bad_value"),
        ("batch_size: {train: 8, eval: 4}", "config.not_data"), ("vocab: {n_layer: }", "config.finetune_twice"),
    ],
)  # fmt: skip
def test_a_table_that_is_another_model_is_refused(more: str, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: {n_layer: 6, n_head: 6, n_embd: 384}\n" + more)
    with pytest.raises(ConfigError) as error:
        resolve([str(file)])
    assert [each.id for each in error.value.problems] == [problem]


def test_a_table_without_a_value_for_a_size_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("model: {n_layer: , n_head: 6, n_embd: 384}\nloss: .nan\n")
    with pytest.raises(ConfigError, match=r"n_layer = None .*: must be a whole number") as error:
        resolve([str(tmp_path / "run.yaml")])
    assert len(error.value.problems) == 1


def test_a_config_of_transformers_is_no_table_of_nanogpt(tmp_path: Path) -> None:
    file = tmp_path / "gpt2.json"
    file.write_text('{"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 64}')
    assert is_asked([str(file)])
