"""The generated part of docs/export.md: GGUF files in llama.cpp, from the result of benchmarks/gguf_in_llama_cpp.py."""

from results import result


def llama_cpp() -> str:
    """How far logits are apart, and what else is the same."""
    found = result("gguf_in_llama_cpp")
    kinds = ("f32", "f16", "bf16", "q8_0", "Q4_K_M, of f16")
    lines = [
        f"| model | spread of logits | {' | '.join(kinds)} |",
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
        "The largest difference of a logit between foretrain and llama.cpp, on three contexts of 128 tokens, and the standard deviation of",
        "the logits beside it:",
        "",
        *lines,
        "",
        f"With the tanh formula in foretrain, too, GPT-2's f32 files differ by {tanh:.2g} at most. 64 greedy tokens are the same in {same} of {len(runs)}",
        f"models with f32. Of {texts} texts, hard ones included, {other} get other tokens in these models. With other rules, texts with other tokens",
        f"of {runs[0]['texts']}: {rules}.",
        f"(`python benchmarks/gguf_in_llama_cpp.py`, llama-cpp-python {found['packages']['llama_cpp_python']}, {found['date']})",
    ])  # fmt: skip
