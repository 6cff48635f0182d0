"""A Python training script of unsloth, TRL or transformers, read with `ast` and never run: its calls' literals."""

import ast
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from foretrain.base.errors import UserError
from foretrain.config.finetune.options import OPTION_OF, TRAININGS
from foretrain.config.finetune.table import FileSettings, known_keys
from foretrain.config.nanogpt_file import Unsupported, evaluate

_MODELS = ("from_pretrained",)
_CALLS = ("get_peft_model", "SFTConfig", "TrainingArguments", "UnslothTrainingArguments", "LoraConfig",
          "BitsAndBytesConfig", "SFTTrainer", "UnslothTrainer", "Seq2SeqTrainingArguments",
          "SentenceTransformerTrainingArguments")  # fmt: skip
_TRAINING_CALLS = {*_CALLS} - {"BitsAndBytesConfig"}
_TRAINER = re.compile(r"(\w+?)(Config|Trainer)")
_NO_TRAINING = ("Model", "Script", "Judge")  # of TRL's configs
# What a model's class is for, by the end of its name: AutoModelForSequenceClassification.
_HEAD = re.compile(r"(?:Auto(?:Peft)?Model|[A-Z]\w*?)For(\w+)")
_HEADS = {
    "CausalLM": "sft", "CausalLMWithValueHead": "ppo", "ImageTextToText": "sft", "Vision2Seq": "sft",
    "ConditionalGeneration": "sft", "SequenceClassification": "classification", "MultipleChoice": "unknown",
    **dict.fromkeys(("TokenClassification", "QuestionAnswering"), "token_classification"),
    "FeatureExtraction": "embedding",
}  # fmt: skip
_UNSLOTH = ("FastLanguageModel", "FastModel", "FastVisionModel")
_LOADERS = (*_UNSLOTH, "AutoModel", "SentenceTransformer")
_OF_IMAGES = ("FastVisionModel", "AutoFeatureExtractor")  # or of sounds: of text alone the figures are too low
_PROCESSOR = re.compile(r"\w*Processor")
_NAMES_OF_MODEL = ("pretrained_model_name_or_path", "model_name")
_MERGES = re.compile("merge_and_unload|(save_pretrained|push_to_hub)_(merged|gguf)")
_ADAPTING = ("get_peft_model", "add_adapter")
_ALONE = ("half", "bfloat16")  # what turns a model into another dtype
_OTHER_ADAPTERS = frozenset((
    "PrefixTuningConfig", "PromptTuningConfig", "PromptEncoderConfig", "IA3Config", "AdaLoraConfig", "LoHaConfig",
    "LoKrConfig", "VeraConfig", "OFTConfig", "BOFTConfig", "LNTuningConfig", "FourierFTConfig",
))  # fmt: skip
_OBJECTS = ("model", "tokenizer", "train_dataset", "eval_dataset", "args", "peft_config", "processing_class",
            "data_collator", "formatting_func", "callbacks", "compute_metrics", "quantization_config",
            "preprocess_logits_for_metrics", "rank_pattern", "reward_funcs", "ref_model", "reward_model", "value_model",
            "teacher_model", "judge", "reward_processing_classes", "device_map", "bnb_4bit_compute_dtype",
            "config")  # fmt: skip
_SUPPORTED = ("is_bfloat16_supported", "is_bf16_supported")
_RENAMED = {"LoraConfig": {"r": "lora_r", "target_modules": "lora_target_modules", "modules_to_save":
            "lora_modules_to_save"}, "get_peft_model": {}}  # fmt: skip


def table_of_script(text: str, source: str) -> tuple[str, dict[str, Any]]:
    """(format, keys) of a script. Raises UserError where it holds no such call, or cannot be parsed."""
    try:
        found = _Script(ast.parse(text))
        uses = [node for node in found.scopes if isinstance(node, ast.Call | ast.Assign | ast.AugAssign)]
        for node in sorted(uses, key=lambda each: (each.lineno, each.col_offset, each.end_lineno, each.end_col_offset)):
            found.look(node) if isinstance(node, ast.Call) else found.set(node)
    except SyntaxError as error:
        where = f"{source}:{error.lineno or 1}"
        raise UserError("config.finetune_not_python", source=where, reason=error.msg or "cannot be read") from None
    except (ValueError, RecursionError, MemoryError):
        raise UserError("config.finetune_not_python", source=source, reason="it is nested too deeply") from None
    if not (found.called & _TRAINING_CALLS or found.trainings or found.trained or found.loops or found.adapts):
        raise UserError("config.finetune_no_calls", path=source)
    for each in found.scopes:
        if isinstance(each, ast.ClassDef) and any(_last(base).endswith("Trainer") for base in each.bases):
            own = {part.name for part in each.body if isinstance(part, ast.FunctionDef)}
            for name in sorted(own & {"compute_loss", "training_step"}):
                found.keys[f"{each.name}.{name}"] = Unread(f"{each.name}.{name}")
    found.decide()
    if found.called & {*_UNSLOTH}:
        if not found.adapts and not found.keys.get("full_finetuning"):
            found.keys["peft_config"] = Unread("no get_peft_model")
        return "unsloth", found.keys
    if "LoraConfig" in found.called and not found.adapts:
        found.keys["peft_config"] = Unread("LoraConfig, which nothing takes")
    if found.called & {"LoraConfig", "get_peft_model"}:
        found.keys = {"lora_r": 8, "lora_dropout": 0.0, **found.keys, "use_peft": True}  # LoraConfig's defaults
    if "get_peft_model" in found.called and found.trainings & {"dpo", "kto"}:
        found.keys["ref_model"] = Unread("a copy of the adapter as the reference")
    elif found.keys.pop("ref_model", None) and found.keys.get("use_peft"):
        found.keys["ref_model"] = Unread("ref_model")
    if found.heads and not {"dtype", "torch_dtype"} & found.keys.keys():
        found.keys["dtype"] = "auto"
    return "trl" if found.trainings else "trainer", found.keys


def _run(node: ast.AST, scope: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """All parts of a script but the bodies of `if False:`, each with the function it stands in, or the script."""
    yield node, scope
    skipped: list[ast.stmt] = []
    if isinstance(node, ast.If) and isinstance(node.test, ast.Constant) and not node.test.value:
        skipped = node.body
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        scope = node
    for part in ast.iter_child_nodes(node):
        if part not in skipped:
            yield from _run(part, scope)


def _other_names(nodes: Sequence[ast.AST]) -> dict[str, str]:
    """What a name stands for that was imported `as` it, given another's, or made a class over another."""
    found: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            found |= {each.asname: each.name for each in node.names if each.asname}
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Name | ast.Attribute):
            found |= {each.id: _last(node.value) for each in node.targets if isinstance(each, ast.Name)}
        elif isinstance(node, ast.ClassDef) and node.bases and _TRAINER.fullmatch(_last(node.bases[0])):
            found[node.name] = _last(node.bases[0])
    return found


def _names(nodes: Sequence[ast.AST]) -> dict[str, Any]:
    """Names that one literal is given to, and nothing else anywhere in the script."""
    names: dict[str, Any] = {}
    bound: Counter[str] = Counter()
    called = {_last(node.func) for node in nodes if isinstance(node, ast.Call)}
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound[node.id] += 1
        elif isinstance(node, ast.FunctionDef) and node.name in called:
            bound.update(each.arg for each in (*node.args.args, *node.args.kwonlyargs))
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            try:
                value = _literal(node.value, names)
            except Unsupported:
                continue
            if name not in names or names[name] == value:  # a repetition does not count
                bound[name] -= 1
                names[name] = value
    return {name: value for name, value in names.items() if not bound[name]}


def _literal(node: ast.expr, names: dict[str, Any]) -> Any:
    """The value of a literal, of a list or table of them, or of torch.bfloat16. Raises Unsupported."""
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(each, names) for each in node.elts]
    if isinstance(node, ast.Dict):
        keys = [key.value if isinstance(key, ast.Constant) else None for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise Unsupported("a table with other keys than texts")
        return {key: _literal(value, names) for key, value in zip(keys, node.values, strict=True)}
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
        return node.attr
    if isinstance(node, ast.Call) and _last(node.func) in _SUPPORTED:
        return True  # a card that has bfloat16 is planned
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return not _literal(node.operand, names)
    if isinstance(node, ast.Constant) and node.value is None:
        return None
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    return evaluate(node, {})


def _last(node: ast.expr) -> str:
    """The last of the names that a dotted name has: get_peft_model of FastLanguageModel.get_peft_model."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


class _Script:
    def __init__(self, tree: ast.Module) -> None:
        self.scopes = dict(_run(tree, tree))
        nodes = list(self.scopes)
        self.names, self.others = _names(nodes), _other_names(nodes)
        imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
        of_trl = [node for node in imports if (node.module or "").split(".")[0] == "trl"]
        self.of_trl = {each.name for node in of_trl for each in node.names}
        self.keys: dict[str, Any] = {}
        self.called: set[str] = set()
        self.trainings: set[str] = set()  # by the configs and trainers that TRL and others have
        self.heads: set[str] = set()  # by the models' classes
        self.models: list[Any] = []
        self.length = 0  # to which a tokenizer cuts
        self.trained: set[ast.AST] = set()  # functions that have trained
        self.reloaded: set[ast.AST] = set()  # those that then load a model
        self.adapts = self.loops = self.by_trainer = False
        self.tables: dict[str, ast.expr] = {}  # what may stand behind **
        self.first_values: dict[str, str] = {}  # the value of a key that decides, as it was written first

    def _named(self, node: ast.expr) -> str:
        name, seen = _last(node), set[str]()
        while name in self.others and name not in seen:
            seen.add(name)
            name = self.others[name]
        return name

    def set(self, node: ast.Assign | ast.AugAssign) -> None:
        """Take what is given to an argument after its call: args.max_length = 8192."""
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            value = node.value if isinstance(node, ast.Assign) else target
            key = target.attr if isinstance(target, ast.Attribute) else ""
            if isinstance(target, ast.Name) and isinstance(value, ast.Dict | ast.Call):
                self.tables[target.id] = value
            elif isinstance(target, ast.Subscript) and _last(target.value) in self.tables:
                key = str(getattr(target.slice, "value", ""))
            if key in OPTION_OF:
                self._take(key, value, key)

    def look(self, call: ast.Call) -> None:
        """Take the arguments of a call that decides something."""
        name = self._named(call.func)
        owner = self._named(call.func.value) if isinstance(call.func, ast.Attribute) else ""
        self._merge(name, scope := self.scopes[call])
        trainer, head = _TRAINER.fullmatch(name), _HEAD.fullmatch(owner)
        if (name == "train" and not call.args and owner != "model") or name == "unsloth_train":
            self.trained.add(scope)
            self.by_trainer |= owner.lower().endswith("trainer") or name == "unsloth_train"
        if name in _MODELS and scope in self.trained:  # what is loaded then is tried or merged, by itself
            self.reloaded |= set() if re.search("Token|Processor", owner) else {scope}
            return
        self._length(call, name, owner)
        self.adapts |= name in _ADAPTING or "peft_config" in [each.arg for each in call.keywords]
        if name in _MODELS and (owner in _OF_IMAGES or _PROCESSOR.fullmatch(owner)):
            self.keys["images"] = Unread(f"{owner}.{name}")
        if name in _MODELS and (owner in _LOADERS or head):
            self._load(call, owner, head[1] if head else "")
        elif name in _CALLS:
            self.called |= {name, owner} - {""}
        elif name == "backward":
            self.loops = True
            return
        elif name in _ALONE and isinstance(call.func, ast.Attribute) and not call.args:
            self.keys[name] = Unread(f"{name}()")
            return
        elif name == "gradient_checkpointing_enable":
            self.keys["gradient_checkpointing"] = True
            return
        elif name in _OTHER_ADAPTERS:
            self.keys["peft_config"] = Unread(name)
            return
        elif name in _LOADERS and name not in _UNSLOTH and call.args:  # SentenceTransformer("…")
            self.called.add(name)
            self._take("model_name", call.args[0], "model_name")
            return
        elif not self._trains(trainer):
            return
        if trainer and self._trains(trainer):
            self.called.add(name)
            self.trainings.add(TRAININGS.get(trainer[1], "unknown"))
            if trainer[2] == "Trainer" and call.args and isinstance(self._text(call.args[0]), str):
                self._take("model", call.args[0], "model_name")
        for keyword in self._keywords(call):
            if name in _MODELS and keyword.arg in _NAMES_OF_MODEL:
                continue
            if keyword.arg in ("per_device_train_batch_size", "max_length", "max_seq_length"):
                self._again(keyword)
            if keyword.arg and keyword.arg not in _OBJECTS:
                self._take(keyword.arg, keyword.value, _RENAMED.get(name, {}).get(keyword.arg, keyword.arg))
            elif keyword.arg == "model" and isinstance(keyword.value, ast.Constant | ast.Name):
                if not isinstance(self._text(keyword.value), str):
                    continue  # a model that was made before
                self._take("model", keyword.value, "model_name")
            elif keyword.arg == "ref_model":
                self.keys["ref_model"] = not isinstance(keyword.value, ast.Constant)
            elif keyword.arg == "compute_metrics":
                self.keys["keeps_logits"] = True
            elif keyword.arg == "bnb_4bit_compute_dtype" and _last(keyword.value) == "float32":
                self.keys[keyword.arg] = Unread("bnb_4bit_compute_dtype = float32")

    def _text(self, node: ast.expr) -> Any:
        """What a literal or the name of one is; None of anything else."""
        name = node.id if isinstance(node, ast.Name) else ""
        return node.value if isinstance(node, ast.Constant) else self.names.get(name)

    def _merge(self, name: str, scope: ast.AST) -> None:
        if _MERGES.fullmatch(name) and scope in self.trained - self.reloaded:
            self.keys["merge"] = True

    def _keywords(self, call: ast.Call) -> Iterator[ast.keyword]:
        """The arguments by name, those of a literal table after ** as well."""
        for keyword in call.keywords:
            node = keyword.value
            if keyword.arg is None and isinstance(node, ast.Name):
                node = self.tables.get(node.id, node)
            if keyword.arg is not None:
                yield keyword
            elif isinstance(node, ast.Call) and _last(node.func) == "dict" and not node.args:
                yield from self._keywords(node)
            elif isinstance(node, ast.Dict) and all(isinstance(each, ast.Constant) for each in node.keys):
                pairs = zip(node.keys, node.values, strict=True)
                yield from (ast.keyword(arg=str(getattr(name, "value", "")), value=value) for name, value in pairs)
            else:
                self.keys["**"] = Unread(f"**{ast.unparse(node)[:40]}")

    def _again(self, keyword: ast.keyword) -> None:
        """Two trainings in one script, which say this otherwise, are none that can be told apart."""
        key, first_values = f"{keyword.arg}", ast.dump(keyword.value)
        if self.first_values.setdefault(key, first_values) != first_values:
            self.keys["twice"] = Unread(f"{key}, set to two values")

    def _trains(self, trainer: re.Match[str] | None) -> bool:
        """Whether a class is a trainer's or its config: one that is known, or any other of TRL's."""
        if trainer is None or trainer[1] in _NO_TRAINING:
            return False
        return trainer[1] in TRAININGS or trainer[0] in self.of_trl

    def _load(self, call: ast.Call, owner: str, head: str) -> None:
        self.called.add(owner)
        self.heads.add(_HEADS.get(head, "unknown") if head else "" if owner in _UNSLOTH else "embedding")
        named = next((each.value for each in call.keywords if each.arg in _NAMES_OF_MODEL), None)
        node = call.args[0] if call.args else named
        if node is None:
            return
        before = self.keys.get("model_name")
        self._take("model_name", node, "model_name")
        self.models.append(self.keys.get("model_name"))
        if before is not None:  # the policy comes first; a reference, a reward model or a teacher after it
            self.keys["model_name"] = before

    def _length(self, call: ast.Call, name: str, owner: str) -> None:
        """The tokens to which a tokenizer cuts, in its call or where it is loaded."""
        words = {each.arg: each.value for each in call.keywords}
        node = words.get("max_length") if "truncation" in words else None
        if name == "from_pretrained" and "Tokenizer" in owner:
            node = words.get("model_max_length")
        if node is not None and name not in _CALLS:
            try:
                length = _literal(node, self.names)
            except Unsupported:
                return
            self.length = max(self.length, length) if type(length) is int else self.length

    def decide(self) -> None:
        """What is trained for, and the length of a sequence, by all that was met."""
        trainings, heads = self.trainings - {"sft"}, self.heads - {"sft", ""}
        if self.loops and not self.by_trainer:  # a loop of the script's own, with a trainer's words
            self.keys["loop"] = "own"
        if trainings:
            self.keys["training"] = next(iter(trainings)) if len(trainings) == 1 else "unknown"
        elif heads and "sft" not in self.heads and not self.called & {*_UNSLOTH}:
            self.keys["training"] = next(iter(heads)) if len(heads) == 1 else "unknown"
        elif self.trainings:
            self.keys["training"] = "sft"
        if len({*self.models}) > 1 and not trainings - {"dpo", "kto"}:
            names = sorted({str(each)[:40] for each in self.models})
            self.keys["models"] = Unread(f"from_pretrained of {' and '.join(names)}")
        given = {"max_length", "max_seq_length", "model_max_length"} & self.keys.keys()
        if self.length and not self.trainings and not given:
            self.keys["max_length"] = self.length

    def _take(self, name: str, node: ast.expr, key: str) -> None:
        if name in _NAMES_OF_MODEL:
            key = "model_name"
        try:
            value = _literal(node, self.names)
        except Unsupported:
            itself = isinstance(node, ast.Name) and node.id == name
            value = Unread(f"{name}, which is no one literal" if itself else f"{name} = {ast.unparse(node)[:40]}")
        if value is not None:
            self.keys[key] = value


class Unread(str):
    """A value that would have to be run, as it is written."""


def without_unread(keys: dict[str, Any], found: FileSettings) -> dict[str, Any]:
    """The keys that are literals; what would have to be run and decides something is named as not planned."""
    known = known_keys("trainer", "unsloth", "trl", "adapter", "training")
    found.unread_model = str(keys.get("model_name")) if isinstance(keys.get("model_name"), Unread) else ""
    for key, value in keys.items():
        if isinstance(value, Unread) and key != "model_name" and known.get(key) != "harmless":
            found.unplanned[str(value)] = "at_least" if key in ("images", "ref_model") else "unknown"
    return {key: value for key, value in keys.items() if not isinstance(value, Unread)}
