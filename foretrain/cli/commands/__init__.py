"""The commands: a module each, imported when somebody asks for the command, so it may import at its head."""

from importlib import import_module

import click

from foretrain.base.process_memory import collected_later
from foretrain.cli.command import Group

# What `foretrain --help` says of each, in its order, without importing any; a command's own help begins with it.
SUMMARIES = {
    "plan": "Plan a run: does it fit, how long, what does it cost, what limits it. Needs no GPU and no torch.",
    "advise": "Find what to change: options and techniques, each planned for your run, ranked by gain and cost.",
    "mfu": "Turn a speed into MFU: with full and causal attention, with recomputation, and as nanoGPT prints it.",
    "gpus": "List the known cards: memory, bandwidth, dense peaks by dtype, power, and the source of each figure.",
    "serve": "Open the planner in your browser: move sliders, watch runs. For this machine only.",
    "mcp": "Offer the planner to coding agents as tools: an MCP server over stdin and stdout.",
    "prepare": "Turn text into verified token shards, on all cores and in constant memory. Resumes after any stop.",
    "data": "Datasets: statistics, checksums, text behind tokens, mixtures.",
    "train": "Train a config, with a live line, evaluation and checkpoints. Ctrl-C saves; --resume auto resumes.",
    "watch": "Measure a training command without changing it: memory, energy, clocks, log. Returns its exit code.",
    "tune": "Measure which settings are fastest here, without changing tokens per step or the result.",
    "runs": "List runs and watched runs: status, steps, loss, speed. Or give a run a name, a note, tags.",
    "top": "Watch this machine's cards and runs: phase, memory against the plan, speed, clocks, what is left.",
    "report": "Write one offline HTML file about a run, a plan, a log or a comparison, with charts and their numbers.",
    "compare": "Compare runs: what differs, which is better beyond noise, and whether one setting explains it.",
    "explain": "Explain a run, a log or a memory snapshot: where memory and time went, why it ran out, what to change.",
    "sample": "Generate text with the newest intact checkpoint of a run.",
    "chat": "Talk to a run's newest checkpoint: it continues each line, and remembers the conversation.",
    "eval": "Measure bits per byte of any text, and run lm-eval's tasks. Results are kept beside the run.",
    "export": "Export a trained model for Hugging Face, llama.cpp or nanoGPT, or as safetensors.",
    "doctor": "Check this machine: cards, driver, torch, compiler, memory, disk. Says what each command misses.",
    "demo": "Run everything in about three minutes on two CPU cores: forecast, training, sample, comparison, report.",
    "calibrate": "Measure this device for one to two minutes; later plans use the result. Keep it idle meanwhile.",
    "verify": "Run 24 short cases on this card and compare them with their predictions: about ten minutes.",
    "languages": "List the languages, and how much of each is translated.",
}
HEADS = {"plan": "plan", "prepare": "train", "runs": "look_back", "sample": "use_model", "doctor": "machine"}


class Program(Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(SUMMARIES)

    def summaries(self) -> dict[str, str]:
        return SUMMARIES

    def heads(self) -> dict[str, str]:
        return HEADS

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in SUMMARIES and cmd_name not in self.commands:
            with collected_later(stays=True):
                module = import_module(f"foretrain.cli.commands.{'sample' if cmd_name == 'chat' else cmd_name}")
            self.add_command(getattr(module, f"{cmd_name}_command"))
        return super().get_command(ctx, cmd_name)
