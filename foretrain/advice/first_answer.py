"""What the first screen of `plan` says beside the plan itself: what limits the run, and which command comes next."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from foretrain.advice.advisor import short_list, state_of
from foretrain.advice.asked import Asked
from foretrain.advice.cluster import options_of
from foretrain.advice.planner import Outcome, Planner
from foretrain.advice.record import Advice, to_set
from foretrain.config.finetune.together import idle
from foretrain.config.finetune.words import changed_words, option_words
from foretrain.config.inference import WORDS as GENERATING
from foretrain.config.microbatches import ACCUMULATION, BATCH
from foretrain.config.options import OPTIONS, RunConfig
from foretrain.config.resolve import NANOGPT_DEFAULTS, WORDS
from foretrain.config.words import as_word, typed_value
from foretrain.predict.finetune.plan import FineTunePlan
from foretrain.predict.forecast import AnyPlan
from foretrain.predict.inference.plan import InferencePlan
from foretrain.predict.memory import REFUSED
from foretrain.predict.plan import Plan
from foretrain.predict.ranks import ClusterPlan
from foretrain.predict.spec import StepName
from foretrain.predict.speed.limit import Bottleneck, bottleneck

MOST_FLAGS = 4  # more settings than that are written to a file
MOST_WORDS = 9  # of a command that is shown: the user's, and the change's; a longer one takes half of a screen

START: dict[StepName, tuple[str, ...]] = {"foretrain": ("foretrain", "train"), "nanogpt": ("python", "train.py")}

Next = Literal["train", "change", "advise", "write", "card"]


@dataclass(frozen=True)
class FirstAnswer:
    """`next`: what `command` does; `advice`: the change that it makes; `changed`: the run with it, where this one is
    too large."""

    bottleneck: Bottleneck | None
    next: Next
    command: tuple[str, ...]
    advice: Advice | None = None
    changed: Outcome | None = None


def first_answer(plan: Plan, asked: Asked) -> FirstAnswer:
    slow = bottleneck(plan.spec())
    found = short_list(plan, plan.step)
    best = found.advised[0] if found else None
    if plan.verdict in (None, "fits"):
        gain = best if best is not None and best.gpu == plan.gpu.name and found and found.goal == "speed" else None
        command = (*_environment(plan), *START[plan.step], *_words(asked, plan, plan.step))
        return FirstAnswer(bottleneck=slow, next="train", command=command, advice=gain)
    if best is None and plan.step == "nanogpt" and plan.verdict_of("foretrain") == "fits":
        command = (*START["foretrain"], *_words(asked, plan, "foretrain"))
        return FirstAnswer(bottleneck=slow, next="train", command=command)
    changed = Planner().outcome(state_of(best, plan)) if best is not None else None
    changes = to_set(best.settings) if best is not None else ()
    if best is None or not is_one_command(plan, best) or len(asked.words) + len(changes) > MOST_WORDS:
        command = _advise_command(asked)
        return FirstAnswer(bottleneck=slow, next="advise", command=command, advice=best, changed=changed)
    command = changed_command(plan, best, asked)
    return FirstAnswer(bottleneck=slow, next="change", command=command, advice=best, changed=changed)


def is_one_command(plan: Plan, advice: Advice) -> bool:
    """Return whether options make all of the change: not other cards or programs, nor nanoGPT's environment."""
    changes = to_set(advice.settings)
    if advice.gpu != plan.gpu.name or advice.used_by_others_bytes != plan.used_by_others_bytes:
        return False
    if advice.step == "nanogpt" and any(setting.option == "allocator_settings" for setting in changes):
        return False
    return bool(changes or advice.step != plan.step) and len(changes) <= MOST_FLAGS


def changed_command(plan: Plan, advice: Advice, asked: Asked) -> tuple[str, ...]:
    """Return the command that runs what was asked about with an advice's changes. nanoGPT reads True, not true."""
    changes = to_set(advice.settings)
    shown = str if advice.step == "nanogpt" else typed_value
    flags = tuple(f"--{setting.option}={shown(setting.after)}" for setting in changes)
    kept = WORDS.without(_words(asked, plan, advice.trainer), [setting.option for setting in changes])
    return (*START[advice.trainer], *kept, *flags)


def words_of(change: Advice) -> list[str]:
    words = {name: option_words(name, value) for name, value in change.options.items()}
    if "world" in words:
        words["world"] = ["--gpus", f"{change.options['world']} x {change.gpu}"]
    return [word for each in words.values() for word in each]


def command_of(plan: AnyPlan, change: Advice, asked: Asked) -> tuple[str, ...]:
    """Return the whole command of a run with a change: of pretraining the one that trains it where one can."""
    if isinstance(plan, ClusterPlan):
        return _command_of_cards(plan, change, asked)
    if isinstance(plan, InferencePlan):
        kept = GENERATING.without(asked.words, change.options)
        if "world" in change.options:
            asked = asked.model_copy(update={"gpu": "auto", "cards": ()})
        return ("foretrain", "plan", *kept, *words_of(change), *asked.card_options(), *asked.options())
    if isinstance(plan, FineTunePlan):
        unused = idle(plan.tune.model_copy(update=change.options))
        return (*finetune_command("plan", asked, change.options, unused), *asked.options())
    if is_one_command(plan, change):
        return changed_command(plan, change, asked)
    return (*_advise_command(asked), "--apply", "1")


def finetune_command(
    name: str, asked: Asked, changed: Mapping[str, bool | int | str] | None = None, without: Collection[str] = ()
) -> tuple[str, ...]:
    model, *words = asked.words
    return ("foretrain", name, model, *changed_words(words, changed or {}, without), *asked.card_options())


def _command_of_cards(plan: ClusterPlan, change: Advice, asked: Asked) -> tuple[str, ...]:
    changed, cards, now = options_of(plan, change), change.shared, plan.cluster
    typed = tuple(as_word(name, value) for name, value in changed.items())
    words = "foretrain", "plan", *WORDS.without(asked.words, list(changed)), *typed
    rent = asked.options(rent=plan.config.price_per_hour)
    if cards is None or (cards.text, cards.link) == (now.text, now.link.name):
        return (*words, *asked.card_options(), *rent)
    given = dict(zip(asked.cards[::2], asked.cards[1::2], strict=True))  # a link or network that was named stays
    link = ("--link", cards.link) if "--link" in given or cards.link != now.link.name else ()
    network = ("--network", given["--network"]) if "--network" in given and cards.nodes > 1 else ()
    others = ("--used-by-others", asked.others) if asked.others else ()
    return (*words, "--gpus", cards.text, *link, *network, *others, *rent)


def within_command(plan: Plan, then: Plan, changed: Sequence[str], asked: Asked) -> tuple[str, ...]:
    """What to do with the steps that fit in a limit; () where they are written to a file first. nanoGPT takes them as
    words; a run that does not fit is changed first."""
    if plan.verdict in REFUSED:
        return _advise_command(asked)
    if plan.step == "foretrain" or asked.wrote:
        return ()
    kept = WORDS.without(_words(asked, plan, plan.step), changed)
    return (*START[plan.step], *kept, *(f"--{name}={getattr(then.config, name)}" for name in changed))


def _advise_command(asked: Asked) -> tuple[str, ...]:
    return ("foretrain", "advise", *asked.words, *asked.card_options())


def _words(asked: Asked, plan: Plan, step: StepName) -> tuple[str, ...]:
    """Return the words with which a step's trainer runs what was planned, with the device where needed."""
    on_cpu = step == "foretrain" and plan.gpu.kind == "cpu" and plan.config.device != "cpu"
    words = asked.words if step == "foretrain" else _nanogpt_words(asked.words, plan.config)
    on_card = plan.gpu.kind == "cuda" and plan.config.device == "cpu"
    on_apple = plan.gpu.kind == "mps" and plan.config.device != "mps"
    device = "cpu" if on_cpu else "cuda" if on_card else "mps" if on_apple else ""
    return (*words, *([f"--device={device}"] if device else []))


def _environment(plan: Plan) -> tuple[str, ...]:
    """What nanoGPT's train.py reads from its environment, and foretrain from the config."""
    settings = plan.config.allocator_settings
    return (f"PYTORCH_CUDA_ALLOC_CONF={settings}",) if settings and plan.step == "nanogpt" else ()


def _nanogpt_words(words: Sequence[str], config: RunConfig) -> tuple[str, ...]:
    """Return what train.py takes: its files, and its keys with Python's values, written out; piped text is a file."""
    parts = WORDS.split(words)
    sources = ["FILE.py" if word.name == "-" else word.typed[0] for word in parts if not word.key]
    files = [source for source in sources if source.endswith(".py")]
    keys = {word.key for word in parts}
    if len(files) < len(sources):
        keys |= {key for key, value in NANOGPT_DEFAULTS.items() if getattr(config, key, value) != value}
    if config.total_batch_size:
        keys |= {BATCH, ACCUMULATION}
    taken = [key for key in RunConfig.model_fields if key in keys and OPTIONS[key].nanogpt == "has"]
    return (*files, *(f"--{key}={value}" for key in taken if (value := getattr(config, key)) != "auto"))
