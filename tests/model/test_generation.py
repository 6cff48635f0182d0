"""Generation with a KV cache: equal to a model that reads its whole context for each token, and to transformers'."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrain.config.families import family_of
from foretrain.config.options import RunConfig
from foretrain.config.shape import ModelShape
from foretrain.model import foreign, llama
from foretrain.model.gpt2 import NanoGPT
from foretrain.model.language_model import LanguageModel, make_model
from foretrain.model.sampling import Sampling
from foretrain.model.writer import Reader, Writer, choose, generate, kept_of
from tests.kit.families import large
from tests.kit.tiny import tiny

LLAMA: dict[str, Any] = {"recipe": "llama", "n_head": 4, "n_embd": 64, "mlp_width": 96, "dropout": 0.0, "bias": False}
PLAIN: dict[str, Any] = {"dropout": 0.0, "bias": False}
FAMILIES: dict[str, dict[str, Any]] = {
    "nanogpt": {}, "nanogpt, bias": {"bias": True}, "nanogpt, bmm": {"attention": "bmm", **PLAIN},
    "modern": {"recipe": "modern", **PLAIN}, "nanochat": {"recipe": "nanochat", **PLAIN}, "llama": LLAMA,
    "llama, grouped": {**LLAMA, "n_kv_head": 2}, "llama, one head of keys, tied": {**LLAMA, "n_kv_head": 1,
    "tied_embeddings": True}, "qwen3": {**LLAMA, "n_kv_head": 2, "head_dim": 32, "qk_norm": True},
}  # fmt: skip
T = 16
LONG = 5 * T // 2  # tokens: the window moves several times
PROMPT = [1, 2, 3]


def model_of(name: str) -> LanguageModel:
    torch.manual_seed(1)
    return large(make_model(tiny(block_size=T, **FAMILIES[name])), 0.2)


def uncached(model: LanguageModel, ids: list[int], count: int, sampling: Sampling, seed: int = 0) -> list[int]:
    """The same, with all of the window read for each token: the oldest quarter leaves when it is full."""
    generator = torch.Generator().manual_seed(seed)
    window, made = list(ids)[-T:], list[int]()
    for _ in range(count):
        with torch.no_grad():
            logits = model.lm_head(model.hidden(torch.tensor([window]))[0, -1])
        made.append(choose(logits[:90], sampling, generator))
        window.append(made[-1])
        if len(window) > T:
            window = window[-(T - T // 4) :]
    return made


@pytest.mark.parametrize("name", FAMILIES)
def test_cached_generation_equals_uncached_token_for_token(name: str) -> None:
    """Greedy and drawn, far beyond the context length, from short prompts and from those that are too long."""
    model = model_of(name)
    for prompt in (PROMPT, list(range(40, 40 + T + 5))):
        for sampling in (Sampling(0, 0), Sampling(0.8, 5), Sampling(1.2, 0, 0.7)):
            made = generate(
                model, prompt, LONG, temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p,
                seed=0, vocab_size=90,
            )  # fmt: skip
            assert list(made) == uncached(model, prompt, LONG, sampling)


def test_nanogpts_own_forward_pass_is_cached_too() -> None:
    torch.manual_seed(1)
    model = large(NanoGPT(tiny(block_size=T)), 0.2)
    made = generate(model, PROMPT, 2 * T, temperature=0, top_k=0, seed=0, vocab_size=90)
    assert list(made) == uncached(model, PROMPT, 2 * T, Sampling(0, 0))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("pieces", [[1] * T, [5, 1, 4, 6], [T], [T - 1, 1]])
def test_logits_are_those_of_one_pass_whatever_is_read_at_once(name: str, pieces: list[int]) -> None:
    """But for float32's rounding, whose order is the kernels' own; a wrong position or key is a thousand times that."""
    model = model_of(name)
    ids = torch.randint(0, 96, (1, T), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = model.lm_head(model.hidden(ids))[0]
    rounding = 64 * torch.finfo(torch.float32).eps * float(expected.abs().max())
    reader, at = Reader(model), 0
    for size in pieces:
        found = reader.read(ids[0, at : at + size].tolist())
        at += size
        assert (found - expected[at - 1]).abs().max() < rounding, at
    reader.forget()
    assert torch.equal(reader.read(ids[0, :3].tolist()), Reader(model).read(ids[0, :3].tolist()))


def theirs(config: RunConfig, model: LanguageModel) -> Any:
    """transformers' model with the weights that an export of ours writes."""
    transformers = pytest.importorskip("transformers")
    values = family_of(config).write_config(config, None)
    made = getattr(transformers, values.pop("architectures")[0])
    other = made(made.config_class(**{key: value for key, value in values.items() if key != "model_type"}))
    weights = foreign.to_hugging_face(dict(model.state_dict()), ModelShape.of(config))
    missing, unexpected = other.load_state_dict(weights, strict=False)
    assert unexpected == []
    assert set(missing) <= {"lm_head.weight"}
    other.tie_weights()
    return other.eval()


@pytest.mark.parametrize("name", ["nanogpt, bias", "llama", "llama, grouped", "qwen3", "nanochat"])
def test_each_logit_is_that_of_transformers_with_its_cache(name: str) -> None:
    config, model = tiny(block_size=T, **FAMILIES[name]), model_of(name)
    other, reader, past, ids = theirs(config, model), Reader(model), None, list(PROMPT)
    step = ids
    while len(ids) < T:
        found = reader.read(step)
        with torch.no_grad():
            answer = other(torch.tensor([step]), past_key_values=past, use_cache=True)
        past = answer.past_key_values
        assert (found - answer.logits[0, -1]).abs().max() < 1e-4
        step = [int(found.argmax())]
        ids += step
    made = other.generate(
        torch.tensor([PROMPT]), attention_mask=torch.ones(1, 3, dtype=torch.long), max_new_tokens=T - 3, min_new_tokens=T - 3, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    assert made[0].tolist() == ids


def test_the_cache_has_the_bytes_that_its_formula_says() -> None:
    """2 · L · K · D · T numbers: heads of keys, not of queries."""
    config = tiny(block_size=T, **FAMILIES["llama, grouped"])
    reader = Reader(model_of("llama, grouped"))
    reader.read(PROMPT)
    assert reader.cache.nbytes == 2 * 2 * 2 * 16 * T * 4
    assert reader.cache.nbytes == 2 * config.n_layer * config.kv_heads * config.head_width * T * 4


def test_a_full_context_drops_its_oldest_quarter() -> None:
    writer = Writer(model_of("nanogpt"), 90, 0)
    assert (kept_of(16), kept_of(1), kept_of(2), kept_of(3)) == (12, 1, 1, 2)
    assert (writer.append([1] * 20), len(writer)) == (4, 16)
    writer.write(Sampling(0, 0))
    assert len(writer) == 12
    assert (writer.append([2] * 4), writer.append([3])) == (0, 5)
    writer.forget()
    assert len(writer) == 0


def test_a_model_with_one_position_writes() -> None:
    model = large(make_model(tiny(block_size=1)))
    assert len(list(generate(model, [5], 4, temperature=0, top_k=0, seed=0, vocab_size=96))) == 4


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-8, 8), min_size=1, max_size=12), st.integers(0, 14), st.floats(0.01, 1), st.floats(0.2, 3))
def test_a_drawn_token_is_of_the_nucleus(logits: list[float], top_k: int, top_p: float, temperature: float) -> None:
    """The fewest likeliest tokens whose probability is top_p, of the top_k likeliest."""
    scores = torch.tensor(logits)
    order = sorted(range(len(logits)), key=lambda i: -logits[i])[: top_k or len(logits)]
    shares = torch.softmax(scores[order].double() / temperature, 0).tolist()
    allowed, total = [], 0.0
    for token, share in zip(order, shares, strict=True):
        allowed.append(token)
        total += share
        if total >= top_p + 1e-6:
            break
    least = {logits[token] for token in allowed}
    for seed in range(8):
        chosen = choose(scores, Sampling(temperature, top_k, top_p), torch.Generator().manual_seed(seed))
        assert float(scores[chosen]) in {float(torch.tensor(value)) for value in least}


def test_top_p_1_draws_what_it_drew_without_it() -> None:
    scores = torch.randn(50, generator=torch.Generator().manual_seed(4))
    for seed in range(20):
        drawn = [choose(scores, Sampling(1, k), torch.Generator().manual_seed(seed)) for k in (0, 50, 60)]
        expected = torch.topk(scores, 50).indices[
            torch.multinomial(torch.softmax(torch.topk(scores, 50).values, 0), 1, generator=torch.Generator().manual_seed(seed))
        ]  # fmt: skip
        assert drawn == [int(expected)] * 3


def test_keys_that_were_copied_for_each_head_are_kept_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in fp32 on a card, whose kernel reads no fewer heads of keys than of queries."""
    model = model_of("llama, grouped")
    expected = uncached(model, PROMPT, 2 * T, Sampling(0, 0))
    monkeypatch.setattr(llama, "takes_groups", lambda q: False)
    made = generate(model, PROMPT, 2 * T, temperature=0, top_k=0, seed=0, vocab_size=90)
    assert list(made) == expected
    reader = Reader(model)
    reader.read(PROMPT)
    assert reader.cache.nbytes == 2 * 2 * 2 * 16 * T * 4


@pytest.mark.parametrize("name", ["nanogpt, bias", "modern", "nanochat", "qwen3"])
@pytest.mark.parametrize("way", ["weights", "autocast"])
def test_half_precision_is_near_one_pass(name: str, way: str) -> None:
    model = model_of(name)
    if way == "weights":
        model.to(torch.bfloat16)
    ids = torch.randint(0, 96, (1, T), generator=torch.Generator().manual_seed(2))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
        expected = model.lm_head(model.hidden(ids))[0].float()
        reader = Reader(model)
        found = torch.stack([reader.read([int(id)]) for id in ids[0]]).float()
    assert (found - expected).abs().max() < 0.05 * expected.abs().max()
    kept = reader.cache.nbytes
    assert kept == 2 * 2 * T * (64 if name == "qwen3" else 32) * 2


def test_a_training_technique_does_not_get_in_the_way() -> None:
    """Recomputed blocks, chunked loss and a replaced block are of training alone."""
    config = tiny(block_size=T, activation_checkpointing=True, loss_chunk_size=8)
    torch.manual_seed(1)
    model = large(make_model(config), 0.2)
    made = generate(model.train(), PROMPT, T, temperature=0, top_k=0, seed=0, vocab_size=90)
    assert list(made) == uncached(model.eval(), PROMPT, T, Sampling(0, 0))


def test_a_pass_that_was_broken_off_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by Ctrl-C: the tokens are read again, into the same places."""
    model = model_of("llama")
    writer, sampling = Writer(model, 90, 0), Sampling(0, 0)
    writer.append(PROMPT)
    made = [writer.write(sampling)[0]]
    last, whole = model.layers()[-1], type(model.layers()[-1]).forward

    def broken(*args: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(last, "forward", broken)
    with pytest.raises(KeyboardInterrupt):
        writer.write(sampling)
    monkeypatch.setattr(last, "forward", lambda *args: whole(last, *args))
    made += [writer.write(sampling)[0] for _ in range(2 * T)]
    assert made == uncached(model, PROMPT, 2 * T + 1, sampling)
