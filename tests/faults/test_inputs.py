"""The judges of the fuzzers can say no, and what the fuzzers found is mended."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from foretrain.base.errors import UserError
from foretrain.base.files import read_bytes
from foretrain.config import checks as config_checks
from foretrain.data.dataset import read_info
from foretrain.data.inspection import verify
from foretrain.data.shards import Source, sealed, unsealed
from foretrain.data.tokenizer import BpeTokenizer, digest_of, tokenizer_of
from tests.faults import grammar, hostile, hostile_configs, inputs, oracle, payloads
from tests.faults.__main__ import TIERS, experiment
from tests.faults.grammar import Case
from tests.kit.command import foretrain
from tests.kit.data import documents, write_shards

UNREACHABLE = (
    "n_layer=0", "n_layer=-3", "n_layer=1.5", "n_head=7", "block_size=0", "batch_size=0", "eval_iters=0", "dropout=1.5",
    "dropout=-0.1", "learning_rate=nan", "learning_rate=inf", "learning_rate=0", "learning_rate=1e309", "beta2=1",
    "min_lr=-1", "max_iters=-1", "vocab_size=99999999999999999999", "grad_clip=-1",
    "memory_limit=-1GB", "memory_limit=1e400GB", "memory_limit=99999999999TB", "device=tpu", "dtype=float64", "bias=maybe",
    "eval_block_size=2048", "total_batch_size=1025", "weight_decay=-inf", "seed=-1", "optimizer=sgd", "price_per_kwh=nan",
)  # fmt: skip


def typed(*overrides: str, verb: str = "plan_json") -> Case:
    words = (*(f"--{override}" for override in overrides), "--gpu=4070", "--json")
    return Case(verb, ("plan", *words), {}, tuple(("override", override) for override in overrides))


@pytest.mark.parametrize("override", UNREACHABLE)
def test_the_oracle_and_the_product_both_say_no(override: str) -> None:
    assert oracle.unreachable(typed(override))
    assert inputs.fate_of(typed(override))["fate"] == "refused"


def test_the_oracle_says_nothing_of_real_configs() -> None:
    for name, text in grammar.seeds().items():
        assert oracle.unreachable(Case("plan", ("plan", name), {name: text.encode()}, (("file", name),))) is None, name


def test_the_harness_knows_the_names() -> None:
    for tier in TIERS.values():
        for name in tier:
            assert experiment(name).__doc__


def test_a_rule_that_is_gone_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_checks, "_RULES", ())
    for override in ("n_head=7", "eval_block_size=2048"):
        assert inputs.fate_of(typed(override))["fate"] in ("silent acceptance", "traceback")


def test_each_way_to_fail_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    for (code, out, err), fate in {
        (1, "", "Traceback (most recent call last)"): "traceback", (2, "{}", ""): "no sentence", (0, "{NaN}", ""): "no JSON",
        (2, "{}", "error: \x1b[2J"): "control character", (0, '{"config": {"n_layer": 9}}', ""): "silent change",
        (0, '{"timing": {"step_s": -1}}', ""): "no quantity", (9, "{}", "error: x"): "traceback", (2, "{}", "error: x"): "refused",
    }.items():  # fmt: skip
        assert inputs.judged(typed("n_layer=12"), code, out, err)[0] == fate


def test_the_corpora_are_as_large_as_they_should_be() -> None:
    assert len(hostile.attempts()) >= 250
    assert sum(each.refused for each in hostile.attempts()) >= 200
    assert len({payload.kind for payload in payloads.payloads()}) >= 20
    assert [grammar.case(i, 1) for i in range(50)] == [grammar.case(i, 1) for i in range(50)]


def test_code_of_a_config_is_told_from_that_of_annotations() -> None:
    for text in (hostile.RUN, hostile.WRITE, f"exec('{hostile.CANARY}')"):
        assert hostile_configs._of_a_config(compile(text, "<string>", "exec"))
    assert not hostile_configs._of_a_config(compile("list[str] | None", "<string>", "eval"))


# -- what was found --------------------------------------------------------------------------------------------


def refused(*words: str) -> str:
    done = foretrain(*words)
    assert done.returncode == 2, done.stderr
    return done.stderr


@pytest.mark.parametrize("text", [
    "n_layer." + "a." * 30_000 + "a = 1", "preset." + "a." * 30_000 + "a = 1", "n_layer = {a = {b = [1]}}", "preset = [1]",
    "[" + "a." * 30_000 + "a]", "n_layer = [" + "[1]," * 9000 + "]",
])  # fmt: skip
def test_deep_tables_are_one_sentence_at_once(text: str, own_directory: Path) -> None:
    Path("c.toml").write_text(text)
    assert len(refused("plan", "c.toml", "--gpu=4070")) < 500


def test_what_cannot_be_read_to_its_end_is_not_begun(own_directory: Path) -> None:
    os.mkfifo("pipe")
    Path("folder").mkdir()
    Path("exact").write_bytes(bytes(100))
    assert read_bytes(Path("exact"), 100) == bytes(100)
    for path, reason in (
        ("pipe", "it is a pipe"),
        ("folder", "director"),
        ("exact", "larger than 99 B"),
        ("/dev/zero", "it is a device"),
    ):
        with pytest.raises(OSError, match=reason):
            read_bytes(Path(path), 99)


def test_long_words_are_cut_where_they_are_shown(own_directory: Path) -> None:
    Path("c.toml").write_text("a" * 60_000 + " = 1")
    assert len(refused("plan", "c.toml", "--gpu=4070")) < 500
    assert len(refused("plan", "--n_layer=" + "9" * 50_000, "--gpu=4070")) < 500


def test_lines_of_keys_are_still_named(own_directory: Path) -> None:
    Path("c.toml").write_text(
        "# n_layer = 1\n\n[model]\n\"n_head\" = -1\n  n_embd=-2\n['data']\nseed = -1\n[nothing]\n"
    )
    text = refused("plan", "c.toml", "--gpu=4070")
    for line in ("n_head = -1 (c.toml:4)", "n_embd = -2 (c.toml:5)", "seed = -1 (c.toml:7)", "nothing (c.toml:8)"):
        assert line in text


def test_json_holds_nothing_that_a_terminal_obeys_and_stays_json() -> None:
    for text in ("\x9b31m", "\x7f", "\ud800", "\x85"):
        done = foretrain("plan", f"--wandb_project={text}", "--gpu=4070", "--json", "--show-config")
        assert json.loads(done.stdout)["config"]["wandb_project"] == text
        assert text not in done.stdout
    done = foretrain("plan", "baby", "--gpu=4070", "--step-time=nan", "--json")
    assert json.loads(done.stdout, parse_constant=pytest.fail)["id"] == "usage.bad_step_time"


def test_too_many_cards_are_refused() -> None:
    assert "300 cards" in refused("plan", "baby", "--gpu=" + "4070," * 300)


def test_a_sealed_record_notices_any_other_byte() -> None:
    text = "".join(sealed(Source(fingerprint="f", description="d", files=3), "s/1", "own"))
    assert unsealed(text, "own") == {
        "schema": "s/1",
        "fingerprint": "f",
        "description": "d",
        "files": 3,
        "source_bytes": None,
    }
    for wrong in (text.replace("3", "2", 1), text.replace("own", "OWN"), text.replace(" ", "", 1), text[:-1]):
        with pytest.raises(ValueError, match=r"digest|JSON|Expecting"):
            unsealed(wrong, "own")


def test_another_tokenizer_beside_the_shards_is_noticed(own_directory: Path) -> None:
    one, other = (BpeTokenizer.train([text * 9], 270) for text in (b"the tower of the river ", b"lemons and stones "))
    folder = write_shards(
        Path("d"), {"train": documents(9), "val": documents(9)}, vocab=300, tokenizer="bpe", sha256=digest_of(one)
    )
    one.save(folder)
    assert tokenizer_of(read_info(folder)) is not None
    assert not verify(read_info(folder)).problems
    other.save(folder)
    with pytest.raises(UserError) as caught:
        tokenizer_of(read_info(folder))
    assert caught.value.id == "data.other_tokenizer"
    assert [problem.id for problem in verify(read_info(folder)).problems] == ["data.other_tokenizer"]


def test_a_table_of_empty_rows_takes_no_memory(own_directory: Path) -> None:
    rows: list[Any] = [{f"k{i}": 1 for i in range(1900)}, *({} for _ in range(5000))]
    Path("x.json").write_text(json.dumps(rows))
    foretrain("compare", "x.json", "x.json", "--gpu=4070", code=7, says="cells")
