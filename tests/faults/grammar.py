"""Configs and overrides at random: real ones with something changed, and lines of the grammar with any value.

A case is what a user could type: words of the command line and the files that they name. `parts` says the same once
more for the oracle, in the order in which it is laid over each other.
"""

import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

from foretrain.config.options import OPTIONS, RunConfig
from foretrain.config.presets import PRESETS
from foretrain.config.resolve import ALIASES, NANOCHAT, to_toml
from tests.kit.command import REPO

VERBS = {"plan_json": 44, "plan": 12, "show": 16, "train": 9, "advise": 5, "compare": 6, "options": 8}
GPUS = ("4070", "3060 12GB", "RTX 4090", "A100-SXM4-80GB", "cpu")

NUMBERS = (
    "0", "1", "-1", "2", "3", "7", "8", "64", "100", "1000", "65535", "65536", "100000", "1048577",
    "2147483648", "9223372036854775807", "9223372036854775808", "18446744073709551616", "-9223372036854775809",
    "1" + "0" * 30, "-1" + "0" * 30, "1" + "0" * 400, "9" * 4299, "9" * 5000, "0x10", "0b11", "0o17", "1_000", "007",
    "0.0", "-0.0", "0.5", "1.0", "1.5", "-0.1", "0.999999999999999999", "1.0000001", "1e-3", "1e3", "1e18", "1e19",
    "1e100", "1e308", "1e309", "-1e309", "5e-324", "1e-400", "nan", "inf", "-inf", "+inf", "-nan", "NaN", "Infinity",
    "1e", "1..2", "1,5", "1 000", "5*8", "2**10", "2**-1", "9**9**9", "1/0", "0**-1", "-(8)", "(-8)**0.5", "1 if 1 else 2",
    "\u0663", "\uff11\uff12", "\u00bd", "\u2212\u0031", "1\u00a0000", "0.1.2", "--5", "+-+5", "~5", "1j", "1_", "_1",
)  # fmt: skip
TEXTS = (
    "", " ", "true", "false", "True", "False", "yes", "None", "null", "auto", "AUTO", "nanogpt", "modern", "scratch",
    "resume", "gpt2", "gpt2-xl", "gpt3", "cuda", "cuda:0", "cuda:999", "cuda:9999", "cpu", "mps", "tpu", "float16",
    "bfloat16", "float32", "float64", "int8", "fp8", "fp16_accumulation", "adamw8bit", "adamw4bit", "muon", "sgd", "linear", "bmm",
    "epochs", "toy", "data/toy", "python-stdlib", "openwebtext", "missing", "/", ".", "..", "~", "/dev/zero", "/proc/self",
    "/nonexistent/x", "out", "a/b", "x.pt", "/dev/null", "/etc/passwd", "[]", "{}", "[1, 2]", "{'a': 1}", "(1,)", "'x'",
    '"x"', "'", '"', "\\", "#", "=", "==", "a=b", "$HOME", "`id`", "$(id)", "%s%n", "{0}", "{key}", "{size:bytes}",
    "\x1b[31mred", "\x07", "\x9b31m", "\r", "a\nb", "\u202eabc", "\u200b", "\ufeff", "\U0001f600", "\u0130", "e\u0301", "\ud800",
    "A" * 300, "A" * 5000, "[" * 500, "-" * 900, "8GB", "10GiB", "-1GB", "0GB", "1e400GB", "99999999999TB", "8 PB", "8",
    "expandable_segments:True", "max_split_size_mb:-1", "backend:cudaMallocAsync", "x:y", "EUR", "$", "byte", "gpt2",
    "r50k_base", "lambda: 0", "__import__('os').system('id')", "exec('1')", "open('x')", "1;2", "1 # 2", "not 1",
)  # fmt: skip
KEYS = (
    "n_layers", "N_LAYER", "n-layer", "nlayer", "batchsize", "lr", "batch_size ", "", "_", "__class__", "model_fields",
    "tokens_per_step", "preset", "model", "model.n_layer", "data", "helps", "n_l\u0430yer", "\U0001f600", "\x1b[2J", "a" * 300,
    "True", "None", "import", "eval", "0", "1e3", "-", "--", "=", "'n_layer'",
)  # fmt: skip

# As nanoGPT's own config files are written: plain assignments, comments, a product, a name used again.
NANOGPT_LIKE = """# a run on one card
out_dir = 'out-small'
eval_interval = 250
eval_iters = 20
log_interval = 10
always_save_checkpoint = False
wandb_log = False
dataset = 'toy'
gradient_accumulation_steps = 5 * 8
batch_size = 12
block_size = 256
n_layer = 6
n_head = 6
n_embd = 384
dropout = 0.2
learning_rate = 1e-3
max_iters = 5000
lr_decay_iters = max_iters
min_lr = 1e-4
beta2 = 0.99
warmup_iters = 100
device = 'cpu'
compile = False
"""


class Case(NamedTuple):
    """What is typed, the files beside it as {name: contents}, and the parts of the config as they follow each other:
    ("preset", name), ("file", name) or ("override", "key=value")."""

    verb: str
    words: tuple[str, ...]
    files: dict[str, bytes]
    parts: tuple[tuple[str, str], ...]


@cache
def seeds() -> dict[str, str]:
    """Real configs by file name: the examples, all knobs of each preset written out, and one as nanoGPT has them."""
    found = {"nanogpt.py": NANOGPT_LIKE}
    for path in sorted((REPO / "examples").rglob("*.toml")) + sorted((REPO / "examples" / "real-cases").glob("*.py")):
        found[path.name] = path.read_text("utf-8")
    for name, values in PRESETS.items():
        found[f"{name}.toml"] = to_toml(RunConfig.model_validate(values))
    return found


def value_for(key: str, chance: random.Random) -> str:
    """A value as it could be typed for a knob: often near one that is right, sometimes anything."""
    knob = OPTIONS.get(ALIASES.get(key, key))
    if knob is None or chance.random() < 0.15:
        return chance.choice(NUMBERS + TEXTS)
    if knob.type in ("int", "float"):
        if chance.random() < 0.4:
            return chance.choice(NUMBERS)
        base = knob.default or 1
        changed = base * chance.choice((-1, 0, 0.5, 1, 1, 1.5, 2, 3, 10, 1e3, 1e6, 1e9))
        return str(int(changed)) if knob.type == "int" and chance.random() < 0.9 else repr(changed)
    if knob.type == "bool":
        return chance.choice(("true", "false", "True", "False", "1", "0", "yes", "off", "2", "maybe", ""))
    if knob.type == "choice" and chance.random() < 0.7:
        return chance.choice(knob.limits.removeprefix("one of ").split(", "))
    return chance.choice(TEXTS)


def key_at_random(chance: random.Random) -> str:
    draw = chance.random()
    if draw < 0.95:
        return chance.choice(list(OPTIONS))
    return chance.choice(KEYS if draw < 0.975 else (*ALIASES, *NANOCHAT))


def _literal(text: str, suffix: str, chance: random.Random) -> str:
    bare = text in NUMBERS or text.lower() in ("true", "false") or text[:1] in "[{("
    if bare != (chance.random() < 0.1):
        lower = suffix == ".toml" and text in ("True", "False")
        return text.lower() if lower else text
    return repr(text) if suffix == ".py" else '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _lines(suffix: str, chance: random.Random) -> str:
    keys = [key_at_random(chance) for _ in range(chance.randrange(0, 9))]
    lines = [f"{key} = {_literal(value_for(key, chance), suffix, chance)}" for key in keys]
    if suffix == ".toml" and chance.random() < 0.2:
        lines.insert(
            chance.randrange(len(lines) + 1), chance.choice(("[model]", "[data]", "[x]", "[[model]]", "[model.x]"))
        )
    return "\n".join(lines) + "\n"


def _changed_value(text: str, suffix: str, chance: random.Random) -> str:
    lines = text.splitlines()
    places = [i for i, line in enumerate(lines) if "=" in line and not line.lstrip().startswith("#")]
    place = chance.choice(places)
    key = lines[place].partition("=")[0].strip()
    lines[place] = f"{key} = {_literal(value_for(key, chance), suffix, chance)}"
    return "\n".join(lines) + "\n"


def _torn(text: str, suffix: str, chance: random.Random) -> bytes:
    """A real config after an accident: cut, a line gone or there twice, a bit flipped, another encoding."""
    lines = text.splitlines(keepends=True)
    data = text.encode()
    place = chance.randrange(len(data))
    many = chance.choice(TEXTS + NUMBERS).encode("utf-8", "surrogatepass")
    ways: Sequence[Callable[[], bytes]] = (
        lambda: data[:place],
        lambda: data[:place] + many + data[place:],
        lambda: data[:place] + bytes([data[place] ^ 1 << chance.randrange(8)]) + data[place + 1 :],
        lambda: data[:place] + bytes(chance.randrange(256) for _ in range(4)) + data[place:],
        lambda: "".join([*lines, chance.choice(lines)]).encode(),
        lambda: "".join(chance.sample(lines, len(lines))).encode(),
        lambda: "".join(line for line in lines if chance.random() < 0.8).encode(),
        lambda: text.encode(chance.choice(("utf-16", "utf-8-sig", "utf-32", "utf-16-be"))),
        lambda: text.replace("\n", chance.choice(("\r\n", "\r", "\n\n", "\x0c\n", ""))).encode(),
        lambda: text.replace("=", chance.choice(("==", ":", "+=", ":=", "= =", "")), 1).encode(),
        lambda: data[:place] + bytes(chance.choice((1, 64, 70_000))) + data[place:],
        lambda: data * chance.choice((2, 200)),
    )
    return chance.choice(ways)()


def _file(number: int, chance: random.Random) -> tuple[str, bytes]:
    draw = chance.random()
    if draw < 0.3:
        suffix = chance.choice((".toml", ".py"))
        return f"c{number}{suffix}", _lines(suffix, chance).encode("utf-8", "surrogatepass")
    name = chance.choice(list(seeds()))
    suffix = name[name.rindex(".") :]
    text = seeds()[name]
    if draw < 0.75:
        for _ in range(chance.choice((1, 1, 1, 2, 4))):
            text = _changed_value(text, suffix, chance)
        return f"c{number}{suffix}", text.encode("utf-8", "surrogatepass")
    return f"c{number}{suffix}", _torn(text, suffix, chance)


def _override(chance: random.Random) -> tuple[tuple[str, ...], str]:
    key = key_at_random(chance)
    value = value_for(key, chance)
    typed = key.replace("_", "-") if chance.random() < 0.2 else key
    if chance.random() < 0.1 and value and not value.startswith("-"):
        return (f"--{typed}", value), "?"  # may be a switch and a word of its own, so the oracle says nothing
    return (f"--{typed}={value}",), f"{key}={value}"


TYPED: dict[str, tuple[str, ...]] = {
    "--gpu": ("4070", "", ",", "4070,3060", "A" * 200, "\x1b[1m", "4070,,", "RTX 9999", "4070," * 300, "auto", "cpu,cpu", "\ud800"),
    "--used-by-others": NUMBERS + TEXTS, "--step-time": NUMBERS, "--logged-mfu": NUMBERS, "--co2": NUMBERS,
    "--within": (*NUMBERS, "12h", "1d12h", "-3h", "1e308h", "nanh", "5EUR", "0s", "3kWh", "1e-300kWh", "9" * 400 + "h"),
    "--tokens": (*NUMBERS, "10B", "1e400", "-5B", "0", "0.001"), "--data-tokens": (*NUMBERS, "10B", "-1", "1e30"),
    "--price": (*NUMBERS, "4070=0.35", "4070=", "=1", "4070=nan", "$1/h", "1e400", "x=1", "4070=1,4070=2"),
    "--largest": ("batch_size", "n_layer", "x", ""), "--trainer": ("nanogpt", "foretrain", "x", ""),
    "--observed": NUMBERS, "--process": NUMBERS, "--alloc-conf": TEXTS, "--write": TEXTS,
}  # fmt: skip


def _options(chance: random.Random) -> tuple[str, ...]:
    """Options of `plan` with any value, on a preset. A trace takes torch and seconds, so --largest stays without --exact."""
    words = ["plan", chance.choice(list(PRESETS))]
    if chance.random() < 0.8:
        words.append("--gpu=4070")
    for option in chance.sample(list(TYPED), chance.choice((1, 1, 2, 3))):
        words.append(f"{option}={chance.choice(TYPED[option])}")  # noqa: PERF401 - each draws
    words += chance.sample(("--json", "--check", "--quiet", "--best", "--show-config"), chance.randrange(3))
    return tuple(word for word in words if word not in ("--largest=batch_size", "--largest=n_layer"))


def case(number: int, seed: int) -> Case:
    """The case of this number; the same for the same seed."""
    chance = random.Random(f"{seed} config {number}")
    verb = chance.choices(list(VERBS), list(VERBS.values()))[0]
    if verb == "options":
        return Case(verb, _options(chance), {}, ())
    words: list[str] = []
    files: dict[str, bytes] = {}
    parts: list[tuple[str, str]] = []
    draw = chance.random()
    if draw < 0.35:
        preset = chance.choice(list(PRESETS))
        words, parts = [preset], [("preset", preset)]
    elif draw < 0.9:
        name, data = _file(number, chance)
        words, files, parts = [name], {name: data}, [("file", name)]
    count = chance.choice((0, 0, 1, 2, 4)) if files else chance.choice((1, 1, 2, 3, 6))
    for _ in range(count):
        more, said = _override(chance)
        words += more
        parts.append(("override", said))
    return Case(verb, _command(verb, words, chance), files, tuple(parts))


def _command(verb: str, words: list[str], chance: random.Random) -> tuple[str, ...]:
    gpu = f"--gpu={chance.choice(GPUS)}"
    if verb == "compare":
        joined = "+".join(word.removeprefix("--") for word in words)
        return ("compare", f"a={joined}", "b=baby", gpu, *(["--json"] if chance.random() < 0.5 else []))
    if verb == "train":
        return ("train", *words, *(["--json"] if chance.random() < 0.5 else []))
    if verb == "show":
        return ("plan", *words, "--show-config", "--json")
    return ("plan" if verb.startswith("plan") else verb, *words, gpu, *(["--json"] if verb == "plan_json" else []))
