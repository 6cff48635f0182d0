"""Where a model's config.json is: a folder, a file, a repository at Hugging Face (no weights, no code), or a preset."""

import difflib
import importlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from foretrain.base.errors import UserError
from foretrain.base.files import read_bytes
from foretrain.config.hub.facts import ModelFacts, ModelSource
from foretrain.config.hub.families import FAMILIES, Parts
from foretrain.config.hub.keys import Keys, Unknown
from foretrain.config.inference import excepted, published_in
from foretrain.config.presets import ModelPreset, model_named, models

MAX_BYTES = 10 * 2**20  # most have some kilobytes, those with many labels some megabytes
FOUR_BITS = "bitsandbytes"
PROCESSOR = "preprocessor_config"  # the key in a config for what lies beside it
PROCESSORS = (PROCESSOR, "processor_config")  # names of files; the second is that of transformers 5
_DTYPES = ("float32", "bfloat16", "float16")


def facts_of(
    config: Mapping[str, Any], where: str = "config.json", families: Mapping[str, Callable[[Keys], Parts]] = FAMILIES
) -> ModelFacts | None:
    """Return a model's facts; None without any. Raises UserError 'config.hub_…', naming `where`, for bad sizes."""
    if not isinstance(config, Mapping):
        raise UserError("config.hub_not_object", where=where)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise UserError("config.hub_no_model_type", where=where)
    keys = Keys(config, where, model_type[:40])
    if model_type not in families:
        return None
    try:
        parts = families[model_type](keys)
    except Unknown:
        return None
    return ModelFacts(model_type=model_type, **parts, **quantized_facts(config, where))


def quantized_facts(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the fields of ModelFacts that say how the published weights are stored."""
    published = Keys(config, where, "").table("quantization_config").config
    return {
        "dtype": dtype_of(config), "quantization": quantization_of(config, where),
        "published": published_in(published) if published else "", "kept": excepted(published),
    }  # fmt: skip


def dtype_of(config: Mapping[str, Any]) -> Any:
    """Return the dtype of the published weights; float32 where the config does not say, as torch.save has it."""
    keys = Keys(config, "", "")
    for table in (keys, keys.table("text_config")):
        word = table.config.get("dtype") or table.config.get("torch_dtype")
        if isinstance(word, str) and word.removeprefix("torch.") in _DTYPES:
            return word.removeprefix("torch.")
    return "float32"


def quantization_of(config: Mapping[str, Any], where: str = "config.json") -> str:
    """Return how the published weights are quantized; "" where they are not."""
    table = Keys(config, where, "").table("quantization_config")
    if not table.config:
        return ""
    method = table.word("quant_method", default=FOUR_BITS)[:40]
    return f"{method}, 8 bits" if method == FOUR_BITS and table.config.get("load_in_8bit") else method


def config_of(text: str, where: str) -> dict[str, Any]:
    """Parse a config.json's text. Raises UserError where it is not JSON, or not an object."""
    try:
        found = json.loads(text)  # with Infinity and NaN, as Python writes them; no size may be one
    except RecursionError:
        raise UserError("config.hub_not_json", where=where, reason="it is nested too deeply") from None
    except ValueError as error:
        raise UserError("config.hub_not_json", where=where, reason=str(error)[:200]) from None
    if not isinstance(found, dict):
        raise UserError("config.hub_not_object", where=where)
    return found


def read_config(path: Path) -> dict[str, Any]:
    try:
        text = read_bytes(path, MAX_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError("config.hub_not_json", where=str(path), reason="it is not UTF-8 text") from None
    except OSError as error:
        raise UserError("config.cannot_read", path=str(path), reason=error.strerror or str(error)) from None
    return config_of(text, str(path))


def names_code(config: Mapping[str, Any]) -> bool:
    return bool(config.get("auto_map"))


_PREFIXES = ("hf://", "hf:", "https://huggingface.co/", "http://huggingface.co/", "huggingface.co/")
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_CONFIG = "config.json"
MODEL_FILES = (_CONFIG, "adapter_config.json")  # which say what a folder holds; the first that is there
_TIMEOUT_S = 10
_MOST_FOLLOWED = 4  # adapters on adapters


def find_source(text: str) -> ModelSource:
    """Return the model of a folder or file with config.json or adapter_config.json, hf:owner/name, or a preset that
    needs no network. Raises UserError."""
    return _found(text, 0)


def preset_source(name: str) -> ModelSource | None:
    preset = model_named(name)
    return _of_preset(preset, preset.name) if preset else None


def unquantized(source: ModelSource) -> ModelSource:
    """Return the model as it was before bitsandbytes put it into 4 bits, which QLoRA does anyway."""
    if source.facts is None or source.facts.quantization != FOUR_BITS:
        return source
    config = {key: value for key, value in source.config.items() if key != "quantization_config"}
    facts = facts_of(config, source.where)
    return keeping(source.model_copy(update={"config": config, "facts": facts}), source.facts.kept)


def keeping(source: ModelSource, kept: tuple[str, ...]) -> ModelSource:
    """Return the model whose weights in 4 bits leave these modules in 16."""
    facts = source.facts and source.facts.model_copy(update={"kept": kept})
    return source.model_copy(update={"facts": facts})


def unknown_model(name: str) -> UserError:
    near = difflib.get_close_matches(name.lower(), models(), n=3)
    if near:
        return UserError("config.hub_unknown_near", name=name[:100], near=near)
    return UserError("config.hub_unknown", name=name[:100])


def text_source(text: str, where: str, name: str = "") -> ModelSource:
    """Return the model of a config.json's text. `where`: what stands in for its path and name. Raises UserError."""
    config = config_of(text, where)
    stated = config.get("_name_or_path")
    last = stated.rstrip("/").split("/")[-1][:100] if isinstance(stated, str) else ""
    return _source(config, name or last or where, where)


def repository_in(text: str) -> str | None:
    for prefix in _PREFIXES:
        if text.startswith(prefix):
            rest = text.removeprefix(prefix).strip("/").split("/tree/")[0]
            return rest if _REPOSITORY.fullmatch(rest) else ""
    return None


def is_repository(text: str) -> bool:
    return bool(_REPOSITORY.fullmatch(text)) and not _path(text)


def describes_model(keys: Mapping[str, Any]) -> bool:
    if {"architectures", "peft_type"} & keys.keys() or {"model_type", "hidden_size"} <= keys.keys():
        return True
    family = keys.get("model_type")  # axolotl's is the name of a class
    return isinstance(family, str) and family in FAMILIES


def _found(text: str, followed: int) -> ModelSource:
    repository = repository_in(text)
    if repository is not None:
        if not repository:
            raise UserError("config.hub_name", name=text[:100])
        preset = model_named(repository)
        return _of_preset(preset, f"hf:{repository}") if preset else _of_hub(repository)
    path = _path(text)
    if path is not None:
        return _of_path(path, followed)
    preset = model_named(text)
    if preset:
        return _of_preset(preset, preset.name)
    if _REPOSITORY.fullmatch(text):
        raise UserError("config.hub_no_path", name=text)
    raise unknown_model(text)


def _path(text: str) -> Path | None:
    try:
        path = Path(text).expanduser()
        return path if text and path.exists() else None
    except (OSError, RuntimeError, ValueError):  # too long; ~ of nobody; a null byte
        return None


def _of_preset(preset: ModelPreset, where: str) -> ModelSource:
    facts = facts_of(preset.config, preset.name)
    return ModelSource(name=preset.name, where=where, config=preset.config, facts=facts)


def _of_path(path: Path, followed: int) -> ModelSource:
    if path.is_dir():
        file = next((path / name for name in MODEL_FILES if (path / name).is_file()), None)
        if file is None:
            raise UserError("config.hub_empty_folder", path=str(path))
        path = file
    config = read_config(path)
    if "peft_type" in config and "model_type" not in config:
        return _of_adapter(config, path, followed)
    name = (path.absolute().parent if path.name == _CONFIG else path.with_suffix("")).name
    return _source({**config, **_processor_beside(path)}, name or str(path), str(path))


def _processor_beside(path: Path) -> dict[str, Any]:
    """Return what a model's processor of pictures or sound is given, under a key of its own."""
    for file in (path.with_name(f"{name}.json") for name in PROCESSORS):
        if file.is_file():
            read = read_config(file)
            inner = [read[key] for key in ("image_processor", "feature_extractor") if isinstance(read.get(key), dict)]
            return {PROCESSOR: inner[0] if inner else read}
    return {}


def _of_adapter(config: dict[str, Any], path: Path, followed: int) -> ModelSource:
    base = config.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise UserError("config.hub_adapter_without", path=str(path))
    if followed >= _MOST_FOLLOWED:
        raise UserError("config.hub_adapters", path=str(path), count=_MOST_FOLLOWED)
    beside = path.parent / base
    named = str(beside) if _path(str(beside)) else base
    if _path(named) or model_named(base):
        return _found(named, followed + 1).model_copy(update={"adapter": config})
    raise UserError("config.hub_adapter", path=str(path), base=base[:100])


def _source(config: dict[str, Any], name: str, where: str) -> ModelSource:
    return ModelSource(
        name=name, where=where, config=config, facts=facts_of(config, where), code=names_code(config)
    )  # fmt: skip


def _of_hub(repository: str) -> ModelSource:
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError:
        raise UserError("environment.hub_package", name=repository, package="huggingface-hub") from None
    try:
        path = _fetched(hub, repository)
    except Exception as error:  # of the network, missing names and missing rights: the library has a class for each
        raise _of_failure(repository, error) from None
    config = {**read_config(Path(path)), **_processor_beside(Path(path))}
    return _source(config, repository.split("/")[1], f"hf:{repository}")


def _fetched(hub: Any, repository: str) -> str:
    """Return the path in the hub's cache. One question goes first: offline hf_hub_download takes half a minute."""
    try:
        hub.get_hf_file_metadata(hub.hf_hub_url(repository, _CONFIG), timeout=_TIMEOUT_S)
    except Exception as error:
        cached = None if _answered(error) else hub.try_to_load_from_cache(repository, _CONFIG)
        if isinstance(cached, str):
            return cached
        raise
    return hub.hf_hub_download(repository, _CONFIG, etag_timeout=_TIMEOUT_S)


def _answered(error: Exception) -> bool:
    return bool({"RepositoryNotFoundError", "EntryNotFoundError"} & {each.__name__ for each in type(error).__mro__})


def _of_failure(repository: str, error: Exception) -> UserError:
    kinds = {each.__name__ for each in type(error).__mro__}
    if "GatedRepoError" in kinds:
        return UserError("config.hub_gated", name=repository)
    if "LocalEntryNotFoundError" not in kinds:  # not cached, and no network
        if "RepositoryNotFoundError" in kinds:
            return UserError("config.hub_no_repository", name=repository)
        if "EntryNotFoundError" in kinds or "RemoteEntryNotFoundError" in kinds:
            return UserError("config.hub_no_config", name=repository)
    return UserError("environment.hub_network", name=repository, reason=_reason(error))


def _reason(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    first = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    return json.dumps(first.split(". ")[0][:160])[1:-1].rstrip(".")
