"""A Python training script of unsloth, TRL or transformers, read with `ast` and never run: the literal arguments of the
calls that decide memory and time.
"""

import ast
from typing import Any

from foretrain.base.errors import UserError
from foretrain.config.finetune.table import FileSettings
from foretrain.config.nanogpt_file import Unsupported, evaluate

_MODELS = ("from_pretrained",)
_CALLS = ("get_peft_model", "SFTConfig", "TrainingArguments", "UnslothTrainingArguments", "LoraConfig",
          "BitsAndBytesConfig", "SFTTrainer", "UnslothTrainer", "Seq2SeqTrainingArguments")  # fmt: skip
_UNSLOTH = ("FastLanguageModel", "FastModel", "FastVisionModel")
_LOADERS = (*_UNSLOTH, "AutoModelForCausalLM", "AutoModel")
_OBJECTS = ("model", "tokenizer", "train_dataset", "eval_dataset", "args", "peft_config", "processing_class",
            "data_collator", "formatting_func", "callbacks", "compute_metrics", "quantization_config",
            "preprocess_logits_for_metrics", "rank_pattern")  # fmt: skip
_SUPPORTED = ("is_bfloat16_supported", "is_bf16_supported")
_RENAMED = {"LoraConfig": {"r": "lora_r", "target_modules": "lora_target_modules", "modules_to_save":
            "lora_modules_to_save"}, "get_peft_model": {}}  # fmt: skip


def table_of_script(text: str, source: str) -> tuple[str, dict[str, Any]]:
    """(format, keys) of a script. Raises UserError where it holds no such call, or cannot be parsed."""
    try:
        tree = ast.parse(text)
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        found = _Script(source, _names(tree))
        for call in sorted(calls, key=lambda each: (each.lineno, each.col_offset)):
            found.look(call)
    except SyntaxError as error:
        where = f"{source}:{error.lineno or 1}"
        raise UserError("config.finetune_not_python", source=where, reason=error.msg or "cannot be read") from None
    except (ValueError, RecursionError, MemoryError):
        raise UserError("config.finetune_not_python", source=source, reason="it is nested too deeply") from None
    if not found.called:
        raise UserError("config.finetune_no_calls", path=source)
    if found.called & {*_UNSLOTH}:
        return "unsloth", found.keys
    if found.called & {"LoraConfig", "get_peft_model"}:
        found.keys = {"lora_r": 8, "lora_dropout": 0.0, **found.keys, "use_peft": True}  # LoraConfig's defaults
    if "AutoModelForCausalLM" in found.called and not {"dtype", "torch_dtype"} & found.keys.keys():
        found.keys["dtype"] = "auto"
    return "trl" if found.called & {"SFTConfig", "SFTTrainer"} else "trainer", found.keys


def _names(tree: ast.Module) -> dict[str, Any]:
    """Names that a literal is given to once, anywhere in the script."""
    names: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            try:
                names.setdefault(node.targets[0].id, _literal(node.value, names))
            except Unsupported:
                names[node.targets[0].id] = _Unread
    return {name: value for name, value in names.items() if value is not _Unread}


class _Unread:
    """Stands for what would have to be run."""


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
    if isinstance(node, ast.Call) and _called(node) in _SUPPORTED:
        return True  # a card that has bfloat16 is planned
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return not _literal(node.operand, names)
    if isinstance(node, ast.Constant) and node.value is None:
        return None
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    return evaluate(node, {})


def _called(call: ast.Call) -> str:
    """The last name of what is called: get_peft_model of FastLanguageModel.get_peft_model."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


class _Script:
    """The keys of a script's calls, as they are met."""

    def __init__(self, source: str, names: dict[str, Any]) -> None:
        self.source, self.names = source, names
        self.keys: dict[str, Any] = {}
        self.called: set[str] = set()

    def look(self, call: ast.Call) -> None:
        """Take the arguments of a call that decides something."""
        name = _called(call)
        owner = (
            call.func.value.id if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name) else ""
        )
        if name in _MODELS and owner in _LOADERS:
            self.called.add(owner)
            if call.args:
                self._take("model_name", call.args[0], "model_name")
        elif name in _CALLS:
            self.called |= {name, owner} - {""}
        else:
            return
        for keyword in call.keywords:
            if keyword.arg and keyword.arg not in _OBJECTS:
                self._take(keyword.arg, keyword.value, _RENAMED.get(name, {}).get(keyword.arg, keyword.arg))
            elif keyword.arg == "model" and isinstance(keyword.value, ast.Constant):
                self._take("model", keyword.value, "model_name")
            elif keyword.arg == "compute_metrics":
                self.keys["keeps_logits"] = True

    def _take(self, name: str, node: ast.expr, key: str) -> None:
        if name in ("pretrained_model_name_or_path", "model_name"):
            key = "model_name"
        try:
            value = _literal(node, self.names)
        except Unsupported:
            value = Unread(f"{name} = {ast.unparse(node)[:40]}")
        if value is not None:
            self.keys[key] = value


class Unread(str):
    """A value that would have to be run, as it is written."""


def without_unread(keys: dict[str, Any], found: FileSettings) -> dict[str, Any]:
    """The keys that are literals; what would have to be run is named as not planned."""
    for value in keys.values():
        if isinstance(value, Unread):
            found.unplanned.append(str(value))
    return {key: value for key, value in keys.items() if not isinstance(value, Unread)}
