"""The table of docs/data.md: what benchmarks/prepare.py measured."""

from results import result

from foretrain.base.units import format_bytes

NAMES = {"bare": "the bare tokenizer, ids thrown away", "foretrain": "`foretrain prepare`",
         "nanogpt": "nanoGPT's way, re-enacted", "build-nanogpt": "build-nanogpt's way, re-enacted"}  # fmt: skip


def prepare() -> str:
    """A row for each source and way; rates only where the bare tokenizer ran on the same source in the same state."""
    found = result("prepare")
    bare = {r["size"]: r["tokens"] / r["wall_s"] for r in found["results"] if r["way"] == "bare"}
    lines = ["| source | way | tokens/s | of bare | peak of all processes |", "| --- | --- | ---: | ---: | ---: |"]
    for r in found["results"]:
        rate = r["tokens"] / r["wall_s"]
        speed = (f"{rate:,.0f}", f"{rate / bare[r['size']]:.0%}") if r["size"] in bare else ("–", "–")
        lines.append(f"| {r['size']} | {NAMES[r['way']]} | {speed[0]} | {speed[1]} | {format_bytes(r['peak_bytes'])} |")
    cores = found["results"][0]["cores"]
    lines += ["", f"{found['machine']['cpu']}, {cores} tokenizing processes, a BPE of 50,257 in tiktoken, {found['date']}. A dash: memory "
              "alone was looked at, beside other work on the machine (`python benchmarks/prepare.py`)."]  # fmt: skip
    return "\n".join(lines)
