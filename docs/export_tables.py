"""The generated part of docs/export.md: GGUF files in llama.cpp, from the result of benchmarks/gguf_in_llama_cpp.py."""

from results import result


def llama_cpp() -> str:
    """How far logits are apart, and what else is the same."""
    found = result("gguf_in_llama_cpp")
    kinds = ("f32", "f16", "bf16", "q8_0", "Q4_K_M, of f16")
    lines = [
        f"| model | deviation | {' | '.join(kinds)} |",
        "| --- | ---: | " + " | ".join(["---:"] * len(kinds)) + " |",
    ]
    for name, run in found["runs"].items():
        apart = [f"{run['types'][kind]['largest_difference']:.2g}" for kind in kinds]
        lines.append(f"| {name} | {run['logits_std']:.2f} | {' | '.join(apart)} |")
    runs = list(found["runs"].values())
    tanh = max(run["f32_with_tanh_gelu"]["largest_difference"] for run in runs if "f32_with_tanh_gelu" in run)
    same = sum(run["greedy_tokens_the_same"] for run in runs)
    texts = sum(run["texts"] for run in runs)
    other = sum(len(run["texts_with_other_tokens"]) for run in runs)
    wrong = {name: len(texts) for name, texts in found["rules_with_other_tokens"].items()}
    rules = ", ".join(f"`{name}` {count}" for name, count in wrong.items())
    return "\n".join([
        "The largest difference between a logit of foretrain and the same one of llama.cpp, over three contexts of 128 tokens. The second",
        "column is the standard deviation of the logits.",
        "",
        *lines,
        "",
        f"With the tanh formula in foretrain as well, the f32 files of GPT-2 differ by {tanh:.2g} at most. From f32 files, {same} of the {len(runs)} models",
        f"generate the same 64 most probable tokens. Of {texts} texts that these models' tokenizers encoded, {other} had other tokens in llama.cpp.",
        f"Of {runs[0]['texts']} texts for each rule and kind of vocabulary alone: {rules}.",
        f"(`python benchmarks/gguf_in_llama_cpp.py`, llama-cpp-python {found['packages']['llama_cpp_python']}, {found['date']})",
    ])  # fmt: skip
