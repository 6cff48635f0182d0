"""The file that starts a run on a cluster: a Slurm script or a SkyPilot task, with what the plan found. No torch."""

import math
import shlex
from collections.abc import Sequence
from pathlib import Path

from foretrain.base.errors import UserError
from foretrain.base.records import Record
from foretrain.config import writer
from foretrain.predict.memory import REFUSED
from foretrain.predict.ranks import ClusterPlan

JOB_KINDS = {"slurm": ".slurm", "sky": ".sky.yaml"}  # and how their files end
SPARE = 1.2  # times the slow end of the estimate
LIMIT_MINUTES = 30  # time limits are whole half hours
SAVE_S = 300  # how long before its limit Slurm asks the run to save and stop
CPUS_PER_RANK = 4  # the step's own thread, the one that reads data, the one that writes checkpoints, and one to spare
PORT = 29500

# Cards as SkyPilot spells them (docs.skypilot.co, "GPUs and Accelerators"), where it is not the name without spaces.
SKY_NAMES = {
    "A100 PCIe 40GB": "A100", "A100 SXM4 40GB": "A100", "A100 PCIe 80GB": "A100-80GB",
    "A100 SXM4 80GB": "A100-80GB", "H100 PCIe 80GB": "H100", "H100 SXM5 80GB": "H100",
    "H200 SXM 141GB": "H200", "B200 SXM": "B200", "V100 PCIe 16GB": "V100", "V100 SXM2 16GB": "V100",
    "V100 SXM2 32GB": "V100-32GB", "P100 SXM2 16GB": "P100",
    "RTX 6000 Ada": "RTX6000-Ada",
}  # fmt: skip


class Job(Record):
    """What a job file is made from. `words`: as `foretrain train` takes them. `high_s`: the duration's slow end."""

    name: str
    words: tuple[str, ...]
    gpu: str
    nodes: int
    per_node: int
    needed_bytes: int
    expected_s: float | None
    high_s: float | None

    @property
    def train(self) -> str:
        return shlex.join(["foretrain", "train", *self.words, "--resume", "auto"])

    @property
    def found(self) -> str:
        memory = f"{self.needed_bytes / 2**30:.1f} GiB a card"
        if self.expected_s is None or self.high_s is None:
            return f"Estimated: {memory}; the time is not known for this card."
        return f"Estimated: {memory}, {self.expected_s / 3600:.1f} h, at most {self.high_s / 3600:.1f} h."


def write_job(kind: str, plan: ClusterPlan, words: Sequence[str]) -> Path:
    """Write the job file of a plan into this folder. Raises UserError if the run does not fit or the file differs."""
    job = job_of(plan, words)
    path = Path(f"{_word(job.name)}{JOB_KINDS[kind]}")
    writer.write_text(job_file(kind, job), path)
    return path


def job_of(plan: ClusterPlan, words: Sequence[str]) -> Job:
    best = plan.best
    if best is None or best.verdict in REFUSED:
        raise UserError("usage.job_does_not_fit", name=plan.name, cards=plan.cluster.text)
    total = best.timing.length_s if best.timing else None
    return Job(
        name=plan.name, words=(*words, *plan.options_of(best)), gpu=plan.cluster.gpu.name, nodes=plan.cluster.nodes,
        per_node=plan.cluster.per_node,
        needed_bytes=best.memory.needed_bytes, expected_s=total.expected_s if total else None,
        high_s=total.high_s if total else None,
    )  # fmt: skip


def job_file(kind: str, job: Job) -> str:
    return _slurm(job) if kind == "slurm" else _sky(job)


def _slurm(job: Job) -> str:
    minutes = None if job.high_s is None else math.ceil(SPARE * job.high_s / 60 / LIMIT_MINUTES) * LIMIT_MINUTES
    limit = "" if minutes is None else f"#SBATCH --time={minutes // 60}:{minutes % 60:02}:00\n"
    return f"""#!/bin/bash
# {job.found}
# Submit with: sbatch FILE. The folder of the run must be one that all nodes see.
# One process runs on each card: {job.gpu}. Many sites want its type too: --gpus-per-node=TYPE:{job.per_node}.
# {SAVE_S} seconds before the time limit the run is asked to save and stop.
#SBATCH --job-name={_word(job.name)}
#SBATCH --nodes={job.nodes}
#SBATCH --ntasks-per-node={job.per_node}
#SBATCH --gpus-per-node={job.per_node}
#SBATCH --cpus-per-task={CPUS_PER_RANK}
{limit}#SBATCH --signal=TERM@{SAVE_S}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

set -u
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT

srun --kill-on-bad-exit=1 {job.train}
code=$?
# 75: stopped by a signal, everything is saved. The job goes back to the queue and resumes there.
if [ "$code" -eq 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def _sky(job: Job) -> str:
    card = SKY_NAMES.get(job.gpu, job.gpu.replace(" ", ""))
    return f"""# {job.found}
# Start with: sky jobs launch FILE. A spot machine that is taken away is replaced, and the run resumes.
# The name of the card is SkyPilot's; `sky show-gpus -a` lists them.
name: {_word(job.name)}
num_nodes: {job.nodes}

resources:
  accelerators: "{card}:{job.per_node}"
  use_spot: true
  job_recovery:
    max_restarts_on_errors: 3

workdir: .

file_mounts:
  /runs:  # a bucket keeps the checkpoints when the machine is gone; the name must be yours alone
    name: {_word(job.name)}-runs
    mode: MOUNT_CACHED

setup: |
  pip install 'foretrain[train]'

run: |
  torchrun --nnodes "$SKYPILOT_NUM_NODES" --node-rank "$SKYPILOT_NODE_RANK" \\
    --nproc-per-node "$SKYPILOT_NUM_GPUS_PER_NODE" \\
    --master-addr "$(echo "$SKYPILOT_NODE_IPS" | head -n 1)" --master-port {PORT} \\
    --no-python {job.train} --out_dir=/runs/{_word(job.name)}
"""


def _word(name: str) -> str:
    kept = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in name.lower())
    return "-".join(part for part in kept.split("-") if part)[:40] or "run"
