"""Weights that a run can start from, looked at without torch: nanoGPT's `ckpt.pt`, safetensors (Hugging Face's, of
GPT-2 as Conv1D matrices, in x out, or ours), a run or checkpoint of foretrain."""

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from foretrain.base import processes
from foretrain.base.errors import UserError
from foretrain.base.files import first_bytes, read_text
from foretrain.base.records import Record
from foretrain.config.families import FAMILIES
from foretrain.config.nanogpt_checkpoint import Refused, shape_of
from foretrain.config.options import OPTIONS
from foretrain.config.presets import GPT2_SHAPES

Kind = Literal["nanogpt", "huggingface", "safetensors", "checkpoint"]
_MAX_HEADER_BYTES = 16 * 2**20
EXACT_GELU = "gelu"
# What Hugging Face's GPT-2 was trained with: the same function to 0.0005, by tanh (arXiv:1606.08415).
TANH_GELUS = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")


class WeightsFile(Record):
    """Weights of a family (`recipe`) and their shape, by the options' names; GPT-2's `n_head` is left out where
    unknown. `longest`: the context that they were made for, where a shorter one needs no cropping. `step`: of their
    training; `moments`: whether AdamW's are there too."""

    kind: Kind
    path: str
    files: tuple[str, ...]
    shape: dict[str, int | bool | float]
    recipe: str = "nanogpt"
    longest: int | None = None
    activation: str = EXACT_GELU
    step: int | None = None
    moments: bool = False
    best_val_loss: float | None = None


def inspect_weights(word: str) -> WeightsFile:
    """Look at the weights that a path names. Raises UserError 'config.init_from_…' where no run can start from it."""
    try:
        path = Path(word).expanduser()
        if not path.exists():
            raise UserError("config.init_from_missing", path=word)
        if path.is_dir():
            return _folder(path)
        if path.suffix == ".safetensors":
            return _safetensors(path, (path,))
        return _nanogpt(path)
    except Refused as error:
        raise UserError("config.init_from_unusable", path=word, reason=str(error)) from None
    except OSError as error:
        raise UserError("config.init_from_unusable", path=word, reason=error.strerror or str(error)) from None
    except RuntimeError as error:  # ~ of nobody
        raise UserError("config.init_from_unusable", path=word, reason=str(error)) from None


def _need_file(path: Path) -> None:
    if path.exists() and not path.is_file():
        raise Refused(f"{path.name} is not a file")


def read_nanogpt(path: Path, folder: Path | None = None, *, moments: bool = False) -> dict[str, Any]:
    """Run nanogpt_checkpoint.py on a ckpt.pt; with `folder` its tensors are written there. Raises Refused."""
    words = [str(folder), "moments" if moments else ""] if folder else []
    most_s = 60 + path.stat().st_size / 10e6
    try:
        ended = processes.finished("foretrain.config.nanogpt_checkpoint", str(path), *words, most_s=most_s)
        answer = json.loads(ended.stdout)
    except subprocess.TimeoutExpired:
        raise Refused(f"reading it did not end within {most_s:.0f} s") from None
    except ValueError:
        raise Refused("reading it takes more memory than a checkpoint of its size can need") from None
    if answer.get("full"):
        raise OSError(28, "No space left on device")
    if "problem" in answer:
        raise Refused(answer["problem"])
    return answer


def _nanogpt(path: Path) -> WeightsFile:
    _need_file(path)
    if first_bytes(path, 4) == b"GGUF":
        raise Refused("it is a GGUF file, made to run a model; give the run or the folder that it was made from")
    held = read_nanogpt(path)
    return WeightsFile(
        kind="nanogpt", path=str(path), files=(str(path),), shape=held["shape"], step=held["iter_num"],
        moments=held["moments"], best_val_loss=held["best_val_loss"],
    )  # fmt: skip


def _folder(path: Path) -> WeightsFile:
    if (path / "run.json").is_file():
        steps = sorted((path / "checkpoints").glob("step-*"))
        if not steps:
            raise Refused("this run has no checkpoint yet")
        return _checkpoint(steps[-1], path)
    if (path / "state.json").is_file():
        return _checkpoint(path, path.parent.parent)
    if (path / "model.safetensors").is_file():
        return _safetensors(path, (path / "model.safetensors",))
    if (path / "model.safetensors.index.json").is_file():
        named = _table(path / "model.safetensors.index.json").get("weight_map")
        names = {str(name) for name in named.values()} if isinstance(named, dict) else set()
        if not names or any("/" in name or "\\" in name for name in names):
            raise Refused("its model.safetensors.index.json names no files beside it")
        return _safetensors(path, tuple(path / name for name in sorted(names)))
    if (path / "ckpt.pt").is_file():
        return _nanogpt(path / "ckpt.pt")
    if (path / "pytorch_model.bin").is_file():
        raise Refused("it has pytorch_model.bin only; save it as safetensors with transformers, which is the default")
    raise Refused("it holds no ckpt.pt, no model.safetensors and no run of foretrain")


def _checkpoint(path: Path, run: Path) -> WeightsFile:
    config = _table(run / "run.json").get("config")
    config = config if isinstance(config, dict) else {}
    of_ranks = sorted(path.glob("model.rank-*.safetensors"))  # several wrote it, each some rows of every tensor
    found = _safetensors(path, tuple(of_ranks) or (path / "model.safetensors",), config=config)
    state = _table(path / "state.json")
    step = state.get("step")
    return found.model_copy(
        update={"kind": "checkpoint", "step": step if type(step) is int else None, "moments": True, "path": str(path)}
    )


def _safetensors(path: Path, files: tuple[Path, ...], config: dict[str, Any] | None = None) -> WeightsFile:
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        for name, shape in _header(file).items():
            shapes[name] = max(shape, shapes.get(name, shape))  # of parts, the one with the last rows has the most
    family = next((each for each in FAMILIES.values() if each.hugging_face and each.owns(shapes)), None)
    if family is None or family.name == "nanogpt":
        return _gpt2(path, files, shapes, config)
    if config is None:
        config = _table(files[0].parent / "config.json")
    shape = family.read_shape(shapes, config)
    return WeightsFile(
        kind="safetensors", path=str(path), files=tuple(map(str, files)), recipe=family.name, shape=shape,
        longest=shape.pop("block_size", None),
    )  # fmt: skip


def _gpt2(
    path: Path, files: tuple[Path, ...], shapes: dict[str, tuple[int, ...]], config: dict[str, Any] | None
) -> WeightsFile:
    named = canonical(shapes)
    attention = next((shape for name, shape in named.items() if name.endswith("attn.c_attn.weight")), ())
    conv1d = len(attention) == 2 and attention[1] == 3 * attention[0]
    shape = shape_of(named, conv1d=conv1d)
    beside = files[0].parent / "config.json"
    if config is None:
        config = _table(beside) if beside.is_file() else {}
    if conv1d:
        _check_hf(config)
    n_head = config.get("n_head")
    if n_head is None:  # a lone file: the published sizes have heads of their own
        n_head = next((s["n_head"] for s in GPT2_SHAPES.values() if _is_size(s, shape)), None)
    if n_head is not None:
        if type(n_head) is not int or n_head < 1 or shape["n_embd"] % n_head:
            raise Refused(f"its config.json says n_head = {str(n_head)[:20]}, which does not divide {shape['n_embd']}")
        shape["n_head"] = n_head
    kind = "huggingface" if conv1d else "safetensors"
    activation = config.get("activation_function", TANH_GELUS[0]) if conv1d else EXACT_GELU
    return WeightsFile(
        kind=kind, path=str(path), files=tuple(map(str, files)), shape=shape, activation=str(activation)[:40]
    )


def _is_size(published: dict[str, Any], shape: dict[str, Any]) -> bool:
    return all(shape[key] == published[key] for key in ("n_layer", "n_embd"))


def canonical(shapes: dict[str, Any]) -> dict[str, Any]:
    """Name tensors as nanoGPT does: Hugging Face's own files of GPT-2 leave out 'transformer.'."""
    bare = any(name in shapes for name in ("wte.weight", "h.0.ln_1.weight"))
    return {f"transformer.{name}" if bare and name != "lm_head.weight" else name: s for name, s in shapes.items()}


def _check_hf(config: dict[str, Any]) -> None:
    width = config.get("n_embd")
    wanted = {
        "model_type": ("gpt2",), "n_inner": (None, 4 * width if isinstance(width, int) else None),
        "activation_function": (EXACT_GELU, *TANH_GELUS), "layer_norm_epsilon": (1e-5,), "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,), "tie_word_embeddings": (True,),
    }  # fmt: skip
    for key, values in wanted.items():
        if key in config and config[key] not in values:
            raise Refused(
                f"its config.json says {key} = {str(config[key])[:40]}; GPT-2 as nanoGPT builds it has {values[0]}"
            )


def _table(path: Path) -> dict[str, Any]:
    _need_file(path)
    try:
        found = json.loads(read_text(path, _MAX_HEADER_BYTES))
    except FileNotFoundError:
        raise Refused(f"it lacks {path.name}") from None
    except (ValueError, RecursionError):
        raise Refused(f"its {path.name} cannot be read") from None
    return found if isinstance(found, dict) else {}


SHARDING, OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"


def begins_in(metadata: Any) -> dict[str, int]:
    """Return, of a safetensors file with parts of tensors, the row of the whole at which each begins
    (torch.distributed.checkpoint's `__metadata__`). Raises ValueError, TypeError and the like for another form."""
    sharding = json.loads(metadata[SHARDING]) if metadata and SHARDING in metadata else {}
    begins = {name: (entry[OFFSETS] or [0])[0] for name, entry in sharding.items()}
    if not all(type(begin) is int and begin >= 0 for begin in begins.values()):
        raise ValueError("rows begin at no number")
    return begins


def _header(path: Path) -> dict[str, tuple[int, ...]]:
    """Return {name: shape} of a safetensors file (a length, then JSON); of a part: the whole's shape up to its end."""
    _need_file(path)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(_MAX_HEADER_BYTES, path.stat().st_size):
            raise Refused(f"{path.name} is no safetensors file, or is cut short")
        text = file.read(length)
    try:
        found = json.loads(text)
        begins = begins_in(found.pop("__metadata__", None))
        return {
            re.sub(r"[^\x20-\x7e]", "?", name): tuple(
                int(n) + (0 if dim else begins.get(name, 0)) for dim, n in enumerate(entry["shape"])
            )
            for name, entry in found.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):  # Infinity is a number
        raise Refused(f"{path.name} is no safetensors file, or is damaged") from None


PUBLISHED_VOCABULARY, PUBLISHED_BLOCK = 50257, 1024


def is_path(init_from: str) -> bool:
    return any(mark in init_from for mark in "/\\") or init_from.endswith((".pt", ".pth", ".safetensors"))


def needs_weights(init_from: str) -> bool:
    return init_from in GPT2_SHAPES or is_path(init_from)


def apply(values: dict[str, Any], sources: dict[str, str]) -> tuple[list[UserError], list[UserError]]:
    """Put the shape of the model that init_from names into the values. Returns (notes, problems)."""
    model = values.get("init_from")
    if not isinstance(model, str):
        return [], []
    if not needs_weights(model):
        return [], []
    recipe = str(values.get("recipe", "nanogpt"))[:40]
    starts = recipe in FAMILIES and FAMILIES[recipe].hugging_face
    if not starts or (model in GPT2_SHAPES and recipe != "nanogpt"):
        return [], [UserError("config.init_from_recipe", init_from=model, recipe=recipe)]
    if model in GPT2_SHAPES:
        return _published(model, values, sources), []
    try:
        weights = inspect_weights(model)
    except UserError as error:
        return [], [error]
    if weights.recipe != values.get("recipe", weights.recipe):
        return [], [UserError("config.init_from_other_recipe", init_from=model, recipe=recipe, own=weights.recipe)]
    if "recipe" not in values and weights.recipe != recipe:
        values["recipe"], sources["recipe"] = weights.recipe, f"init_from={weights.path}"
    return _from_file(weights, values, sources)


def _published(model: str, values: dict[str, Any], sources: dict[str, str]) -> list[UserError]:
    """Take the shape of nanoGPT's init_from='gpt2-xl', whatever the file says; context crops, vocabulary pads."""
    notes = []
    shape = {**GPT2_SHAPES[model], "bias": True}
    block, vocabulary = values.get("block_size"), values.get("vocab_size")
    if not (isinstance(block, int) and block <= PUBLISHED_BLOCK):
        shape["block_size"] = PUBLISHED_BLOCK
    if not (isinstance(vocabulary, int) and vocabulary > PUBLISHED_VOCABULARY):
        shape["vocab_size"] = PUBLISHED_VOCABULARY
    for key, value in shape.items():
        if key in values and values[key] != value:
            source = sources[key]
            notes.append(UserError("config.init_from_wins", key=key, model=model, value=value, source=source))
        values[key] = value
        sources[key] = f"init_from={model}"
    if "vocab_size" not in shape:
        notes.append(UserError("config.init_from_pads", path=model, rows=PUBLISHED_VOCABULARY, vocab_size=vocabulary))
    return notes


def _from_file(
    weights: WeightsFile, values: dict[str, Any], sources: dict[str, str]
) -> tuple[list[UserError], list[UserError]]:
    """Take the shape of the file; the config must agree, but for a smaller context and a larger vocabulary."""
    path, notes, problems = weights.path, [], []
    fits: dict[str, Callable[[Any, Any], bool]] = {"block_size": int.__le__, "vocab_size": int.__ge__}
    notes_of = {"block_size": "init_from_crops", "vocab_size": "init_from_pads"}
    for key, own in weights.shape.items():
        value = values.get(key, own)
        if value == own:
            values[key] = own
            sources.setdefault(key, f"init_from={path}")
        elif key in fits and type(value) is int and value > 0 and fits[key](value, own):
            notes.append(UserError(f"config.{notes_of[key]}", path=path, rows=own, **{key: value}))
        else:
            id = "config.init_from_beyond" if key in fits else "config.init_from_contradicts"
            problems.append(UserError(id, key=key, value=str(value)[:40], own=own, path=path, source=sources[key]))
    if weights.longest is not None:
        value = values.setdefault("block_size", min(weights.longest, OPTIONS["block_size"].default))
        sources.setdefault("block_size", f"init_from={path}")
        if type(value) is int and value > weights.longest:
            given = {"key": "block_size", "value": str(value), "source": sources["block_size"]}
            problems.append(UserError("config.init_from_beyond", own=weights.longest, path=path, **given))
    if "n_head" not in weights.shape and "n_head" not in values:
        problems.append(UserError("config.init_from_heads", path=path))
    if weights.activation in TANH_GELUS:
        notes.append(UserError("config.init_from_gelu", path=path, activation=weights.activation))
    if values.get("init_optimizer") is True and not weights.moments:
        problems.append(UserError("config.init_optimizer_none", path=path))
    return notes, problems
