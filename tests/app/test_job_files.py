"""Job files for Slurm and SkyPilot: what they ask for, and the Slurm script run by stand-ins of Slurm's commands."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import foretrain as library
from foretrain.app.job_files import CPUS_PER_RANK, JOB_KINDS, SAVE_S, Job, job_file, job_of
from tests.kit.command import foretrain, refused

JOB = Job(
    name="My GPT, 2nd try", words=("my.toml", "--max_iters=20"), gpu="A100 SXM4 80GB", nodes=2, per_node=8,
    needed_bytes=30 * 2**30, expected_s=3.0 * 3600, high_s=4.0 * 3600,
)  # fmt: skip
TRAIN = "foretrain train my.toml --max_iters=20 --resume auto"


def options_in(script: str) -> dict[str, str]:
    found = re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", script, flags=re.MULTILINE)
    assert len(found) == script.count("#SBATCH")
    return dict(found)


def test_a_slurm_script_asks_for_what_the_plan_found() -> None:
    script = job_file("slurm", JOB)
    options = options_in(script)
    assert options["job-name"] == "my-gpt-2nd-try"
    assert (options["nodes"], options["ntasks-per-node"], options["gpus-per-node"]) == ("2", "8", "8")
    assert (options["cpus-per-task"], options["signal"]) == (str(CPUS_PER_RANK), f"TERM@{SAVE_S}")
    assert options["time"] == "5:00:00"  # 4 h and a fifth of it, in whole half hours
    assert "requeue" in options
    assert f"srun --kill-on-bad-exit=1 {TRAIN}\n" in script
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_without_a_time_there_is_no_limit() -> None:
    script = job_file("slurm", JOB.model_copy(update={"expected_s": None, "high_s": None}))
    assert "time" not in options_in(script)


def test_a_sky_task_asks_for_what_the_plan_found() -> None:
    task = yaml.safe_load(job_file("sky", JOB))
    assert (task["name"], task["num_nodes"]) == ("my-gpt-2nd-try", 2)
    assert task["resources"]["accelerators"] == "A100-80GB:8"
    assert TRAIN in task["run"]
    assert "--out_dir=/runs/" in task["run"]
    assert "/runs" in task["file_mounts"]  # what outlives the machine
    subprocess.run(["bash", "-n"], input=task["run"], text=True, check=True)


def test_words_are_quoted() -> None:
    words = ("my config.toml", "--dataset=$(rm -rf x)")
    script = job_file("slurm", JOB.model_copy(update={"words": words}))
    line = next(line for line in script.splitlines() if line.startswith("srun"))
    assert shlex.split(line)[4:6] == list(words)


def test_a_job_has_the_options_of_the_strategy_that_is_meant() -> None:
    plan = library.plan("gpt2-1558m", gpus="8 x RTX 4090")
    words = job_of(plan, ["gpt2-1558m"]).words
    assert words[1:] == plan.options_of(plan.best)
    assert f"--strategy={plan.best.strategy}" in words
    same = library.plan("gpt2-1558m", gpus="8 x RTX 4090", strategy=plan.best.strategy)
    assert not any(word.startswith("--strategy") for word in job_of(same, ["gpt2-1558m"]).words)


def test_what_fits_in_no_way_gets_no_job() -> None:
    with refused("usage.job_does_not_fit"):
        job_of(library.plan("gpt2-1558m", gpus="2 x RTX 3060 12GB"), ["gpt2-1558m"])


def test_the_command_writes_it_and_never_over_another(tmp_path: Path) -> None:
    words = ("plan", "gpt2", "--gpus", "2 nodes x 4 x A100", "--write-job")
    for kind in JOB_KINDS:
        foretrain(*words, kind, code=0)
        foretrain(*words, kind, code=2)
    assert {path.name for path in tmp_path.iterdir()} == {"gpt2-124m.slurm", "gpt2-124m.sky.yaml"}
    assert foretrain(*words, "pbs").returncode == 2
    assert "--gpus" in foretrain("plan", "gpt2", "--write-job", "slurm").stderr


SRUN = """#!/bin/bash
shift  # --kill-on-bad-exit
export SLURM_NTASKS=2 SLURM_JOB_NUM_NODES=1 SLURM_NTASKS_PER_NODE=2 SLURM_STEP_ID=0 SLURM_NODEID=0
for rank in 0 1; do
    SLURM_PROCID=$rank SLURM_LOCALID=$rank "$@" &
    pids="$pids $!"
done
code=0
for pid in $pids; do
    wait "$pid" || code=$?
done
exit $code
"""


@pytest.mark.slow
def test_slurm_script_trains_with_stand_ins_of_its_commands(tmp_path: Path) -> None:
    stubs = {
        "srun": SRUN, "scontrol": "#!/bin/bash\necho 127.0.0.1\n",
        "foretrain": f"#!/bin/bash\nexec {shlex.quote(sys.executable)} -m foretrain \"$@\"\n",
    }  # fmt: skip
    for name, text in stubs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    tiny = (
        "--n_layer=1", "--n_head=2", "--n_embd=32", "--block_size=32", "--batch_size=2", "--eval_interval=4",
        "--gradient_accumulation_steps=2", "--max_iters=8", "--eval_iters=1", "--compile=false", "--device=cpu",
    )  # fmt: skip
    job = JOB.model_copy(update={"words": ("baby", *tiny, "--out_dir=out"), "nodes": 1, "per_node": 2})
    env = {
        **os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(sys.path),
        "SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "here",
    }  # fmt: skip
    done = subprocess.run(
        ["bash", "-c", job_file("slurm", job)], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert (record["status"], record["world"], record["steps_done"]) == ("finished", 2, 8)
