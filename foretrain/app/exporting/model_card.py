"""README.md of an export: metadata that the Hub reads, and the run's figures, each with how it was measured.

A card is English, as cards on the Hub are. Names in it come from a user's files: they are made plain text, so that
none of them is read as YAML, Markdown or HTML.
"""

import json
import math
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foretrain.app.exporting.card_facts import CardFacts
from foretrain.base.errors import UserError
from foretrain.base.installation import need_extra

_LONGEST = 100  # characters of a name
# Signs that Markdown or HTML may read as more than themselves, and those that make an address a link.
_ACTIVE = re.compile(r"[^\w\s.,:;'%=/()+-]|(?<![^\W_])_|_(?![^\W_])|(?<=www)\.|:(?=/)|^[+-]")


def card_of(facts: CardFacts) -> str:
    """The card's text. Raises UserError where huggingface_hub is not installed, or takes these facts for none."""
    hub = need_extra("huggingface_hub", "export")
    text = f"---\n{_metadata(hub, facts)}\n---\n\n{_body(facts)}"
    return str(hub.ModelCard(text))  # which reads the metadata back


def plain(text: str) -> str:
    """A name as Markdown shows it letter by letter: without control characters, signs written as entities."""
    return _ACTIVE.sub(lambda found: f"&#{ord(found[0])};", _one_line(text)) or "&#45;"


def _metadata(hub: Any, facts: CardFacts) -> str:
    name = _one_line(facts.name) or "model"
    results = []
    if facts.loss is not None:
        data = _one_line(facts.dataset) or "data"
        task = {"task_type": "text-generation", "dataset_name": data, "dataset_type": _slug(data)}
        for metric, value, shown in (
            ("loss", facts.loss.val, "Validation loss, nats a token"),
            ("perplexity", facts.loss.perplexity, "Validation perplexity"),
        ):
            if math.isfinite(value):
                told = {"metric_type": metric, "metric_value": float(f"{value:.6g}"), "metric_name": shown}
                results.append(hub.EvalResult(**task, **told, dataset_split="validation"))
    more: dict[str, Any] = {}
    if facts.co2_g is not None:
        more["co2_eq_emissions"] = {
            "emissions": float(f"{facts.co2_g:.4g}"),  # grams, as the Hub has it
            "source": facts.co2_how,
            "training_type": "fine-tuning" if facts.base_model else "pre-training",
            "hardware_used": _one_line(facts.hardware),
        }
    data = hub.ModelCardData(
        library_name="transformers", pipeline_tag="text-generation", tags=["foretrain", facts.model_type],
        base_model=facts.base_model or None, datasets=list(facts.hub_datasets) or None,
        model_name=name if results else None, eval_results=results or None, **more,
    )  # fmt: skip
    return data.to_yaml()


def _body(facts: CardFacts) -> str:
    rows = [f"| {each.name} | {plain_figure(each.value)} | {plain_figure(each.how)} |" for each in facts.figures]
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", facts.config)), default=0))
    use = _USE if facts.has_tokenizer else _USE_IDS
    return "\n".join([
        f"# {plain(facts.name)}",
        "",
        f"A {facts.model_type} language model, trained with foretrain. It continues text; it was not tuned to follow",
        "instructions or to be safe.",
        "",
        "| figure | value | how it was found |",
        "| --- | --- | --- |",
        *rows,
        "",
        f"The validation split is the run's own.{'' if facts.evaluated else ' No other evaluation was made.'}",
        "What licence the data allow for the weights is not known here: add one, and say what the data hold.",
        "",
        "## Use",
        "",
        use,
        "",
        "## Config",
        "",
        f"{fence}toml",
        facts.config,
        fence,
        "",
    ])  # fmt: skip


def plain_figure(text: str) -> str:
    """The same for a whole figure, whose own words may be longer."""
    return " ".join(plain(text[at : at + _LONGEST]) for at in range(0, len(text), _LONGEST)) if text else ""


def _one_line(text: str) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in text[:_LONGEST]).split())


def _slug(text: str) -> str:
    """What the Hub takes for the id of a dataset."""
    return re.sub(r"[^\w.-]+", "-", text, flags=re.ASCII).strip("-.") or "data"


_USE = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # this folder, or owner/name on the Hub
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
ids = tokenizer("The", return_tensors="pt").input_ids
print(tokenizer.decode(model.generate(ids, max_new_tokens=50)[0]))
```"""
_USE_IDS = """The tokenizer is not in this folder: the model takes and gives token ids.

```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(".")  # this folder, or owner/name on the Hub
```"""


_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)


def check_repository(name: str) -> None:
    """Raise UserError where a text is not owner/name."""
    if not _REPOSITORY.fullmatch(name):
        raise UserError("usage.push_name", name=name[:100])


def upload(name: str, folder: Path, files: Sequence[str], message: str) -> str:
    """Upload these files of a folder to the repository, in one commit; returns its address.

    A repository that is not there yet is made, private. Raises UserError; the folder stays as it is.
    """
    hub = need_extra("huggingface_hub", "export")
    kept = shlex.quote(str(folder))
    if not hub.get_token():
        raise UserError("environment.push_no_token", name=name, path=kept)
    api = hub.HfApi()
    try:
        address = api.create_repo(name, private=True, exist_ok=True)
        operations = [hub.CommitOperationAdd(path_in_repo=each, path_or_fileobj=folder / each) for each in files]
        api.create_commit(name, operations, commit_message=message)
    except Exception as error:  # of the network, of rights, of names: the library has a class for each
        raise UserError("environment.push_failed", name=name, path=kept, reason=_reason(error)) from None
    return str(address)


def _reason(error: BaseException) -> str:
    """The last line that says something: the library puts its request's number first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if "Request ID" not in line] or lines or [type(error).__name__]
    return json.dumps(told[-1][:200], ensure_ascii=False)[1:-1].rstrip(".")
