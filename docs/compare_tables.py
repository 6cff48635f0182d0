"""The generated parts of compare.md."""

from dataclasses import replace
from pathlib import Path

from results import result

from foretrain.comparison.compare import Comparison, compare
from foretrain.comparison.sources import load
from foretrain.comparison.sources.request import take_apart
from foretrain.hardware.catalogue import find

CASES = Path(__file__).parent.parent / "examples" / "real-cases"
COMMAND = (
    "foretrain compare B1=examples/real-cases/b1.log+examples/real-cases/b1.py "
    'B2=examples/real-cases/b2.csv+examples/real-cases/b2.py --gpu "RTX 4070"'
)


def case_b() -> Comparison:
    words = (f"B1={CASES}/b1.log+{CASES}/b1.py", f"B2={CASES}/b2.csv+{CASES}/b2.py")
    return compare([load(replace(take_apart(word), gpu=find("RTX 4070"))) for word in words])


def power() -> str:
    """Right answers of 100, by noise and length."""
    found = result("compare_power")
    lines = [
        "| noise | steps | same but for the seed | 2 % faster | 3 % faster | 5 % less loss left | 10 % less | unlike lengths, same | unlike, 3 % faster |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in found["synthetic"]:
        cells = [
            f"{found['pairs'] - row['same']['any']}",
            *map(str, (*row["speed_found"].values(), *row["loss_found"].values(), *row["unlike_lengths"].values())),
        ]
        lines.append(f"| {row['noise']} | {row['steps']:,} | {' | '.join(cells)} |")
    b1, trained = found["b1"], found["trained"]
    lines += [
        "",
        f"Measured: the {b1['steps']} undisturbed steps that case B1's log prints lie {b1['step_deviation']:.2%} apart (one standard "
        f"deviation), its evaluations of 3.3 M tokens {b1['evaluation_deviation']:.2%} from their neighbours. "
        f"{trained['runs']} runs of a tiny model on a CPU ({found['machine']['cpu']}, {found['date']}) that differ in their seed alone: "
        f"steps {trained['step_deviation']:.1%} apart, training losses {trained['train_loss_deviation']:.2%}, validation losses "
        f"{trained['val_loss_deviation']:.2%}; of their {trained['pairs']} pairs {trained['called_different']['tokens']} were called "
        f"different in what a token teaches and {trained['called_different']['speed']} in speed: other programs ran on the machine, and a step "
        "was a fifth longer; no setting took the blame. Between starts on a card nothing has been measured yet.",
    ]
    return "\n".join(lines)
