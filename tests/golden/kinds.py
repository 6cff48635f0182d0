"""The cases of fine-tuning, several cards and inference: `--method`, `--gpus`, `--inference`, and the page's forms.

A line of a list is a case: its commands as they are typed, with " ; " between them. As in cases.py all is literal.
Files of other trainers are in files/ here, and in tests/data/field/ of the base commit, which people have written.
"""

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .case import Case, Step, case

FILES = Path(__file__).parent / "files"


def _typed(kind: str, lines: str, *, errors: bool = False, **more: Any) -> Iterator[Case]:
    """A case for each line; every fifth is a quick one."""
    for number, line in enumerate(lines.strip().splitlines()):
        command, _, words = line.partition(" ")
        name = f"error: {kind}: {line}" if errors else f"{command} {kind}: {words}"
        steps = [tuple(shlex.split(step)) for step in line.split(" ; ")]
        yield case(name, *steps, quick=number % 5 == 0, **more)


def _files() -> dict[str, str | bytes]:
    return {str(path.relative_to(FILES)): path.read_bytes() for path in sorted(FILES.rglob("*.*"))}


# --- fine-tuning ---

PLANS = """
plan smollm2-135m --method=lora --evaluate --keeps-logits --eval-accumulation-steps=1 --lora-saved=lm_head,embed_tokens --gpu T4 --json
plan qwen2.5-0.5b --method=qlora --optim=sgd --lora-saved=lm_head,embed_tokens --gpu RTX-4090 --json
plan llama-3.2-1b --method=full --loop=trl --batch-size=4 --grad-accum=4 --gpu RTX-4070 --json
plan gemma-3-270m --method=dora --packing --lora-r=64 --gpu RTX-3060-12GB --full
plan pythia-160m --method=lora --reentrant --r=8 --gpu H100-SXM5-80GB
plan gpt2 --method=qlora --seq-len=1024 --price-per-hour=0.4 --lora-saved=lm_head,embed_tokens --gpu L4 --oneline
plan qwen3-0.6b --method=full --liger --gpu RTX-5090 --explain
plan phi-2 --method=dora --no-gradient-checkpointing --lora-saved=lm_head,embed_tokens --gpu V100-SXM2-16GB --json --used-by-others 1GB
plan mistral-7b-v0.1 --method=lora --load-in-8bit --r=8 --gpu RTX-5090 --check
plan gemma-3-1b --method=qlora --loop=unsloth --unsloth --seq-len=384 --batch-size=3 --lora-saved=lm_head,embed_tokens --gpu RTX-3060-12GB --json
plan qwen3-8b --method=full --seq-len=512 --unsloth --offload-checkpoints --gpu RTX-4070 --json
plan santacoder --method=dora --optim=paged_adamw_8bit --loop=axolotl --r=8 --gpu RTX-4070 --json
plan llama-3.1-8b --method=lora --loop=torchtune --max-grad-norm=0 --r=8 --gpu V100-SXM2-16GB --full
plan phi-3.5-mini --method=qlora --compile --no-double-quant --r=8 --gpu A100-SXM4-80GB
plan olmoe-1b-7b --method=full --max-steps=800 --co2=400 --currency=USD --amp=bf16 --gpu RTX-4070 --oneline
plan smollm2-135m --method=dora --loop=trl --packing --lora-saved=lm_head,embed_tokens --gpu V100-SXM2-16GB --explain
plan qwen2.5-0.5b --method=lora --evaluate --eval-batch-size=2 --r=8 --gpu L4 --json --used-by-others 1GB
plan llama-3.2-1b --method=qlora --attn=eager --optim=adafactor --lora-targets=q_proj,v_proj --gpu H100-SXM5-80GB --check
plan gemma-3-270m --method=full --fp16 --dataset-tokens=10M --epochs=1 --gpu T4 --json
plan pythia-160m --method=dora --max-steps=500 --price-per-kwh=0.2 --lora-dropout=0.05 --gpu H100-SXM5-80GB --json
plan gpt2 --method=lora --loop=llama-factory --optim=adamw_8bit --dtype=float32 --gpu H100-SXM5-80GB --json
plan qwen3-0.6b --method=qlora --optim=muon --r=8 --gpu RTX-5090 --full
plan phi-2 --method=full --optim=adafactor --loop=trl --packing --gpu L4
plan mistral-7b-v0.1 --method=dora --evaluate --keeps-logits --eval-accumulation-steps=1 --seq-len=384 --batch-size=3 --lora-dropout=0.05 --gpu L4 --oneline
plan gemma-3-1b --method=lora --evaluate --eval-batch-size=2 --liger --r=8 --gpu H100-SXM5-80GB --explain
plan qwen3-8b --method=qlora --loop=llama-factory --optim=paged_adamw_8bit --r=8 --gpu RTX-5090 --json --used-by-others 1GB
plan santacoder --method=full --attn=eager --compile --gpu RTX-3060-12GB --check
"""
OF_FILES = """
plan llama --method lora --gpu 3060 --json
plan neox/config.json --method full --gpu 4070 --full
plan trl.yaml --gpu 4090 --json ; plan trl.yaml --lora-r 16 --gpu 4070 --show-config
plan torchtune.yaml --gpu 4070 ; plan torchtune.yaml --gpu 4070 --show-config --json
plan unsloth.yaml --gpu 3060 --json
plan unsloth_script.py --gpu T4 --full
plan trainer_script.py --gpu 3090 --json
plan llama_factory.yaml --gpu 4070 --json
plan arguments.json --model smollm2-360m --gpu 4070 --json
plan smollm2-360m --accelerate accelerate.yaml --method full --gpu A100-SXM4-80GB
advise trl.yaml --gpu 3060
"""
OF_OTHERS = """
plan tests/data/field/yaml/ax_qlora_cce.yml --gpu 4090 --json
plan tests/data/field/yaml/ax_qlora_fa2.yml --gpu 3090
plan tests/data/field/yaml/lf_qlora_qwen25_7b.yaml --gpu 4090 --json
plan tests/data/field/scripts/grpo_script.py --gpu 3090 --check ; plan tests/data/field/yaml/lf_kto_gemma2_9b.yaml --gpu 3090
plan tests/data/field/yaml/lf_ppo.yaml --gpu 4090 --json
plan tests/data/field/yaml/trl_dpo_full_15b.yaml --gpu 4090 --full
plan tests/data/field/scripts/dpo_script.py --gpu 4090 --json
plan tests/data/field/scripts/seqcls_script.py --gpu 4070 --json
plan tests/data/field/yaml/litgpt_lora.yaml --gpu 4090 ; plan tests/data/field/yaml/swift_sft.yaml --gpu 4090
plan tests/data/field/models/llama_bnb4 --method qlora --gpu 4090 ; plan tests/data/field/models/llama_gptq --method lora --gpu 4090
explain tests/data/field/logs/lf_oom.log --config tests/data/field/yaml/lf_qlora_qwen25_7b.yaml --gpu 4090
explain tests/data/field/logs/trainer_log.jsonl --config tests/data/field/yaml/ax_qlora_fa2.yml --gpu 4090 --json
"""
QUESTIONS = """
plan gpt2 --method lora --gpu 4070 --largest batch_size ; plan gpt2 --method lora --gpu 4070 --largest batch_size --json
plan gpt2 --method lora --gpu 4070 --largest seq_len
plan llama --method lora --seq-len 64 --gpu 4070 --largest lora_r
plan pythia-160m --method full --gpu 4070 --within 2h --dataset-tokens 10M --json
plan pythia-160m --method full --gpu 4070 --within 1kWh
plan smollm2-135m --method lora --gpu 4070 --within 0.5EUR --price 0.4/h
plan smollm2-135m --method lora --gpu 4090 --tokens 3M ; plan smollm2-135m --method lora --gpu 4090 --tokens 3M --json
plan gpt2 --method lora --gpu 4070 --within 2h --largest batch_size
plan smollm2-135m --method lora --gpu 3060,4070,4090 --dataset-tokens 5M --price 3060=0.08,4090=0.35
plan smollm2-135m --method lora --gpu 3060,4070,4090 --dataset-tokens 5M --json
plan smollm2-135m --method lora --gpu 3060,4090 --within 1EUR ; plan smollm2-135m --method lora --gpu 3060,4090 --oneline
plan smollm2-135m --method lora --gpu 4090 --max-steps 5000 --price 0.35/h --co2 380 --full
plan smollm2-135m --method lora --gpu 4090 --step-time 0.9 --max-steps 5000 --json
plan llama-3.2-1b --method full --gpu 4070 --check
plan gpt2 --method lora --gpu 4070 --explain --observed 3GiB --process 2GiB ; plan gpt2 --method lora --gpu 4070 --explain --json
plan gpt2 --method lora --gpu 4070 --full --lang ar
plan pythia-410m --method full --seq-len 2048 --batch-size 8 --gpu 3060 --lang hi
"""
ADVICE = """
advise smollm2-135m --method lora --gpu 4070
advise pythia-160m --method full --gpu 3060 --json --top 4
advise qwen2.5-0.5b --method full --gpu 3060 --full --used-by-others 4GB
advise gpt2 --method lora --gpu 4090 --goal speed --json
advise smollm2-135m --method full --seq-len 1024 --batch-size 32 --gpu 4070 --goal fit
advise smollm2-135m --method lora --gpu 3060 --seq-len 1024 --evaluate --eval-batch-size 32
"""
TRACES = """
plan llama --gpu 4070 --seq-len 64 --method lora --exact
plan llama --gpu 4070 --seq-len 64 --batch-size 2 --method full --exact --json
plan llama --gpu 4070 --seq-len 64 --batch-size 2 --method qlora --evaluate --exact --json
plan llama --gpu 4070 --seq-len 64 --batch-size 2 --method lora --snapshot s.pickle --json
plan llama --gpu 4070 --seq-len 64 --batch-size 2 --method lora --exact --explain --json
advise llama --gpu 4070 --method full --seq-len 64 --exact --top 1
"""
FINETUNING_ERRORS = """
plan qwen3-8b --method loro --gpu 4090 ; plan qwen9-8b --method lora --gpu 4090
plan qwen3-8b --method lora --gpu cpu ; plan hf:nobody/nothing --method lora --gpu 4090
plan gpt2 --method full --lora-r 8 --gpu 4090 ; plan gpt2 --method lora --bf16 --fp16 --gpu 4090
plan gpt2 --method lora --gpus 2x4090 ; plan gpt2 --method lora --gpu 4090 --trainer nanogpt
plan gpt2 --method lora --gpu 4090 --best --within 2h ; plan gpt2 --method lora --gpu 4090 --largest n_layer
plan gpt2 --method lora --gpu 4090 --within 1ms ; plan gpt2 --method lora --gpu 4090 --within soon
plan gpt2 --method lora --gpu 4090 --write w.toml --tokens 1M ; plan gpt2 --method lora --gpu 4090 --seq-len 0
plan gpt2 --method lora --gpu 4090 --warmup-steps 10 ; plan gpt2 --method lora --gpu 4090 --lora-alpha 16
plan gpt2 --method lora --gpu 4090 --step-time 0.00001 ; plan gpt2 --method lora --gpu 3060,4090 --explain
plan gpt2 --method lora --gpu T4 --attn flash_attention_2 ; plan gpt2 --method lora --gpu 4090 --json --oneline
plan broken.yaml --gpu 4090 ; plan nobodys.yaml --gpu 4090
plan accelerate.yaml --gpu 4090 ; plan vision --method lora --gpu 4090 ; train trl.yaml
plan olmoe-1b-7b --method lora --lora-dropout 0.1 --gpu 4090
advise gpt2 --method lora --gpu 4090 --goal fame ; advise gpt2 --method lora --gpu 4090 --apply 1
advise gpt2 --method lora --gpu 3060,4090 ; advise gpt2 --method lora --gpus 2x4090
"""
PYTHON_OF_FINETUNING = """import json
import foretrain
p = foretrain.plan("smollm2-135m", gpu="RTX 4070", method="lora", seq_len=512, batch_size=2)
print(p); print(repr(p)); print(json.dumps(p.to_json(), sort_keys=True))
print(foretrain.plan("gpt2", gpu="4090", method="qlora", within="2h").tune)
advised = foretrain.advise("pythia-160m", gpu="3060", method="full").advised
print([(a.rules, a.effect.needed_bytes) if hasattr(a, "rules") else (a.ids, a.needed_bytes) for a in advised])
for words in ({"method": "loro"}, {"lora_r": 8}, {"gpu": "cpu"}, {"nonsense": 1}):
    try:
        foretrain.plan("gpt2", **{"gpu": "4070", "method": "full", **words})
    except Exception as error:
        print(type(error).__name__, getattr(error, "id", ""), error)
"""


def finetunings() -> Iterator[Case]:
    files = _files()
    yield from _typed("finetune", TRACES, files=files, group="torch")
    yield from _typed("finetune", PLANS)
    yield from _typed("finetune", QUESTIONS, files=files)
    yield from _typed("finetune file", OF_FILES, files=files)
    yield from _typed("finetune file", OF_OTHERS)
    yield from _typed("finetune", ADVICE)
    yield from _typed("finetune", FINETUNING_ERRORS, files=files, errors=True)
    yield case("plan finetune narrow", "plan llama-3.2-1b --method qlora --gpu 4070", group="narrow", quick=True)
    yield case("python finetune", Step(python=PYTHON_OF_FINETUNING))


# --- several cards ---

CLUSTERS = """
plan gpt2-124m --gpus "2 x RTX 4090"
plan gpt2-124m --gpus "2 nodes x 8 x A100 SXM4 80GB" --json --compile=false
plan gpt2-40m --strategy=ddp --gpus "8 x H100 SXM5" --json
plan gpt2-124m --strategy=zero1 --gpus "2 x RTX 3090" --link nvlink --full
plan gpt2-30m --strategy=fsdp --gpus "4 x RTX 3060 12GB" --json
plan gpt2-40m --strategy=fsdp_no_reshard --gpus "2 nodes x 2 x 4090" --network 10GbE --oneline
plan gpt2-30m --strategy=fsdp --hold_gradients=true --gpus "8 x T4" --dtype=float16 --json --used-by-others 1GB
plan gpt2-30m --strategy=hsdp --gradient_accumulation_steps=64 --gpus "2 nodes x 4 x H100 SXM5" --network "8 x ib-200"
plan gpt2-40m --optimizer=muon --gpus "2 x RTX 5090" --json
plan gpt2-40m --optimizer=adamw8bit --gpus "2 x RTX 4090" --link pcie4x8 --json
plan gpt2-40m --activation_checkpointing=true --compile=false --gpus "4 x V100 SXM2 16GB" --dtype=float16 --full
plan gpt2-30m --recipe=modern --gpus "2 x RTX 3090" --json
plan gpt2-40m --batch_size=auto --total_batch_size=524288 --compile=false --gpus "2 x RTX 3060 12GB"
plan gpt2-30m --gpus 4 --gpu "RTX 3060 12GB" --link pcie3x8 --price 0.2/h ; plan gpt2-30m --gpus 2x3090 --co2 380 --json
plan gpt2-30m --gradient_accumulation_steps=2 --gpus "2 x RTX 4090" ; plan gpt2-30m --gpus 2x4090 --show-config
plan gpt2-774m --compile=false --gpus "2 x RTX 3060 12GB" --check
plan gpt2-30m --gradient_accumulation_steps=32 --gpus "2 nodes x 8 x A100 SXM4 80GB" --write-job slurm
plan gpt2-30m --gpus "2 x RTX 4090" --write-job sky --quiet
plan examples/real-cases/b1.py --gpus "4 x RTX 4070"
plan gpt2-30m --gpus "2 x RTX 4090" --lang ar --full ; plan gpt2-30m --gpus "2 x RTX 4090" --lang hi
advise gpt2-30m --gpus "2 x RTX 3090" --goal speed --json
advise gpt2-30m --gpus "2 x RTX 3090" --goal cost --price 0.2/h
advise gpt2-124m --compile=false --batch_size=32 --gpus "2 x RTX 3060 12GB" --goal fit
advise gpt2-40m --compile=false --gpus "4 x RTX 4090" --top 3 --full
"""
SMALL = {
    "n_layer": "3",
    "n_head": "4",
    "n_embd": "256",
    "block_size": "256",
    "vocab_size": "8192",
    "batch_size": "4",
    "gradient_accumulation_steps": "8",
    "compile": "false",
}
CLUSTER_ERRORS = """
plan gpt2-124m --gpus "3 x RTX 4090" ; plan gpt2-124m --gpus "RTX 4090 + RTX 3060"
plan gpt2-124m --gpus "1 x 4090" ; plan gpt2-124m --gpus "2 x" ; plan gpt2-124m --gpus "2 x RTX 4091"
plan gpt2-124m --gpus 2x4090 --link nvlink ; plan gpt2-124m --gpus 2x4090 --link pci4 ; plan gpt2-124m --gpu 4090 --link nvlink
plan gpt2-124m --gpus 2x4090 --network ib-200 ; plan gpt2-124m --gpus 2x4090 --gpu 3060
plan gpt2-124m --gpus 2x4090 --largest batch_size ; plan gpt2-124m --gpus 2x4090 --within 12h
plan gpt2-124m --gpus 2x4090 --trainer nanogpt ; plan gpt2-124m --gpus "2 x M4 Max"
plan gpt2-124m --gpus 2x4090 --strategy=hsdp ; plan gpt2-124m --gpus 2x4090 --eval_only=true
plan gpt2-124m --gpus 2x4090 --write-job pbs ; plan gpt2-124m --gpu 4090 --write-job slurm
advise gpt2-124m --gpus 2x4090 --apply 1 ; advise gpt2-124m --gpus 2x4090 --exact
"""
PYTHON_OF_CLUSTERS = f"""import json
import foretrain
small = {SMALL!r}
p = foretrain.plan("gpt2-124m", gpus="2 x RTX 3090", used_by_others="1GB", **small)
print(p); print(repr(p)); print(json.dumps(p.to_json(), sort_keys=True))
print([change.text for change in foretrain.advise("baby", gpus="2 x RTX 3090", goal="speed", **small).advised])
for cards in ("2 x", "4090 + 3090", "3 x 4090", "2 x M4 Max"):
    try:
        foretrain.plan("gpt2-124m", gpus=cards, **small)
    except Exception as error:
        print(type(error).__name__, getattr(error, "id", ""), error)
"""


def clusters() -> Iterator[Case]:
    traced = tuple(f"--{name}={value}" for name, value in SMALL.items())
    yield case("exact cluster", ("plan", *traced, "--gpus", "2 x RTX 3090", "--exact", "--json"), group="torch")
    yield from _typed("cluster", CLUSTERS)
    yield from _typed("cluster", CLUSTER_ERRORS, errors=True)
    yield case("plan cluster narrow", "plan gpt2-30m --gpus 2x4090", group="narrow")
    yield case("python cluster", Step(python=PYTHON_OF_CLUSTERS))


# --- generating text ---

INFERENCES = """
plan llama-3.1-8b --inference --weights q4_k_m --context 16k --gpu 4070
plan llama-3.1-8b --inference --gpu 4070 --full
plan qwen3-8b --inference --weights int8 --batch 8 --gpu A100-SXM4-80GB --json
plan gpt2-124m --inference --gpu 3060 --json ; plan gpt2-350m --recipe=modern --inference --context 2048 --gpu T4 --json
plan qwen3-30b-a3b --inference --weights q4_k_m --gpu 3090 --json
plan gemma-3-4b --inference --context 32k --kv q8_0 --gpu 4070 --json
plan llama-2-7b --inference --weights q4_0 --gpu 3060,4070,4090 ; plan qwen3-8b --inference --gpu 3060,4090 --json
plan llama-3.1-8b --inference --largest context --gpu 3060,4090 ; plan qwen3-4b --inference --largest batch --gpu 4070
plan llama-3.3-70b --inference --gpu 4090 --check
plan mistral-7b-v0.3 --inference --engine pytorch --weights bf16 --gpu 4090 --oneline
plan smollm2-1.7b --inference --prompt 2000 --batch 4 --gpu 3060 --used-by-others 2GB
plan qwen3-8b --inference --weights q4_k_m --gpu RX-7900-XTX ; plan qwen3-8b --inference --gpu "M4 Max 64GB" --json
plan llama-3.2-3b --inference --gpu 4070 --lang ar ; plan llama-3.2-3b --inference --gpu 4070 --lang hi --full
"""
INFERENCE_ERRORS = """
plan llama-3.1-8b --inference --gpu 2x4090 ; plan llama-3.1-8b --inference --gpu 4070 --weights q7
plan --inference --gpu 4070 ; plan llama-9 --inference --gpu 4070 ; advise llama-3.1-8b --inference --gpu 4070
plan llama-3.1-8b --inference --gpu 4070 --exact ; plan llama-3.1-8b --inference --gpu 4070 --context 0
plan llama-3.1-8b --inference --gpu 4070 --largest lora_r ; plan llama-3.1-8b --inference --gpu 4070 --json --full
"""
PYTHON_OF_INFERENCE = """import json
import foretrain
p = foretrain.plan("llama-3.1-8b", "RTX 4070", inference=True, weights="q4_k_m", context=16_384)
print(p); print(repr(p)); print(json.dumps(p.to_json(), sort_keys=True))
for words in ({"weights": "q7"}, {"contxt": 3}, {"batch": -1}):
    try:
        foretrain.plan("gpt2", "RTX 4070", inference=True, **words)
    except Exception as error:
        print(type(error).__name__, getattr(error, "id", ""), error)
"""


def inferences() -> Iterator[Case]:
    yield from _typed("inference", INFERENCES)
    yield from _typed("inference", INFERENCE_ERRORS, errors=True)
    yield case("plan inference of a run", "plan out-a --inference --gpu 4070", inputs=("made",))
    yield case("python inference", Step(python=PYTHON_OF_INFERENCE))


# --- the page ---

TUNED: dict[str, Any] = {"kind": "fine-tuning", "gpu": "RTX 4090"}
FORM: dict[str, Any] = {**TUNED, "model": "smollm2-135m", "values": {"method": "lora", "seq_len": "512"}}
PRICED = {"max_steps": "1000", "price_per_hour": "2", "currency": "USD", "gradient_checkpointing": False}
PASTED = {**TUNED, "model": "mine", "config": (FILES / "llama/config.json").read_text(), "gpu": "RTX 4070"}
FINETUNING_FORMS: tuple[dict[str, Any], ...] = (
    {**FORM, "others": "2GB"},
    {**TUNED, "model": "qwen3-8b", "values": {"method": "qlora"}},
    {**TUNED, "model": "gpt2", "values": {"batch_size": "64"}, "gpu": "RTX 3060 12GB"},
    {**FORM, "values": PRICED},
    {**PASTED, "values": {"method": "full"}},
    {**FORM, "values": {"method": "loro", "lora_r": "x", "nonsense": "1"}},
    {**FORM, "gpu": "cpu"},
    {**TUNED, "model": "nothing"},
)
TEXT: dict[str, Any] = {"kind": "generation", "model": "qwen3-8b", "values": {"weights": "q4_k_m"}, "gpu": "RTX 3060"}
PAIR: dict[str, Any] = {"model": "gpt2-124m", "values": SMALL, "gpu": "RTX 3090", "count": "2", "others": "1GB"}
PAIRS = ({}, {"count": "4", "gpu": "RTX 4090"}, {"count": "3"}, {"count": "many"}, {"gpu": "cpu"})
READ = ("trl.yaml", "torchtune.yaml", "unsloth_script.py", "llama/config.json", "broken.yaml")


def _served(name: str, path: str, *bodies: dict[str, Any], words: str = "", quick: bool = False) -> Case:
    return case(
        f"serve {name}",
        Step(tuple(words.split()), requests=tuple(("POST", path, body) for body in bodies)),
        quick=quick,
    )


def pages() -> Iterator[Case]:
    """What the page asks of fine-tuning and of several cards."""
    cards = {**FORM, "cards": ["RTX 3060 12GB", "RTX 4070", "A100 SXM4 80GB"]}
    pairs = [{**PAIR, **other} for other in PAIRS]
    read = [{"kind": "fine-tuning", "name": name, "text": (FILES / name).read_text()} for name in READ]
    traced = {**PASTED, "values": {"method": "lora", "seq_len": "64"}}
    refused = [("/api/cards", {**PAIR, "cards": ["RTX 4090"]}), ("/api/exact", PAIR), ("/api/toml", PAIR)]
    yield from (
        _served("finetune exact", "/api/exact", traced),
        _served("finetune form", "/api/form", {"kind": "fine-tuning"}, quick=True),
        _served("finetune form hi", "/api/form", {"kind": "fine-tuning"}, words="--lang hi"),
        _served("finetune plans", "/api/plan", *FINETUNING_FORMS, quick=True),
        _served("finetune plans ar", "/api/plan", *FINETUNING_FORMS[:3], words="--lang ar"),
        _served("finetune cards", "/api/cards", cards, {**cards, "gpu": "cpu"}),
        _served("finetune read", "/api/read", *read),
        _served("finetune advice", "/api/advice", {**FORM, "gpu": "RTX 3060 12GB"}),
        _served("text", "/api/plan", TEXT, {**TEXT, "values": {"weights": "q99"}}, quick=True),
        _served("cluster plans", "/api/plan", *pairs, quick=True),
        _served("cluster plans hi", "/api/plan", PAIR, words="--lang hi"),
        _served(
            "cluster advice", "/api/advice", {**PAIR, "goal": "speed"}, {**PAIR, "goal": "speed", "trainer": "nanogpt"}
        ),
        case("serve cluster others", Step(requests=tuple(("POST", path, body) for path, body in refused))),
    )
