"""The tables of docs/data.md: what benchmarks/prepare.py and prepare_stream.py measured."""

from results import result

from foretrain.base.units import format_bytes

NAMES = {"bare": "the bare tokenizer, ids thrown away", "foretrain": "`foretrain prepare`",
         "nanogpt": "nanoGPT's way, re-enacted", "llm.c": "llm.c's and build-nanogpt's way, re-enacted",
         "datatrove": "datatrove's JsonlReader and DocumentTokenizer"}  # fmt: skip


def prepare() -> str:
    """A row for each source and way: the median of its quiet rounds and their range, each against the tokenizer's of
    the same round."""
    found = result("prepare")
    lines = ["| source | way | rounds | tokens/s | of bare (range) | peak of all processes |", "| --- | --- | ---: | ---: | ---: | ---: |"]  # fmt: skip
    for r in found["results"]:
        if r["tokens_per_s"] is None:
            rounds = [one for one in found["rounds"] if (one["size"], one["way"]) == (r["size"], r["way"])]
            speed, of = f"{max(one['tokens'] / one['wall_s'] for one in rounds):,.0f} ¹", "–"
        else:
            speed, (share, low, high) = f"{r['tokens_per_s'][0]:,.0f}", r["of_bare"]
            of = f"{share:.0%}" if low == high else f"{share:.0%} ({low:.0%} to {high:.0%})"
        lines.append(
            f"| {r['size']} | {NAMES[r['way']]} | {r['rounds']} | {speed} | {of} | {format_bytes(r['peak_bytes'])} |"
        )
    cores = found["results"][0]["cores"]
    lines += ["", f"{found['machine']['cpu']}, {cores} tokenizing processes, a BPE of 50,257, {found['date']} (`python benchmarks/prepare.py`). "
              "¹ The benchmark could not tell the way's own processes from other programs'."]  # fmt: skip
    return "\n".join(lines)


def stream() -> str:
    """A row for each length of a generated source, and how seconds and memory grow with it."""
    found = result("prepare_stream")
    lines = ["| generated JSON lines | ids | seconds | processor seconds | peak of all processes |", "| --- | ---: | ---: | ---: | ---: |"]  # fmt: skip
    for r in found["passes"]:
        lines.append(
            f"| {r['size']} | {r['tokens']:,} | {r['wall_s']:,.0f} | {r['processor_s']:,.0f} | {format_bytes(r['peak_bytes'])} |"
        )
    (slope,) = found["slopes"]
    shares = [r["outside"] for r in found["passes"]]
    lines += ["", f"Bytes as ids, on {found['machine']['cpu']}, {found['date']} (`python benchmarks/prepare_stream.py --tokenizer byte`). Other programs "
              f"had {min(shares):.0%} to {max(shares):.0%} of the cores. In log-log, processor seconds "
              f"grow with a slope of {slope['processor_s']:.2f} (1 is linear), memory with one of {slope['peak_bytes']:.3f} (0 is constant)."]  # fmt: skip
    return "\n".join(lines)
