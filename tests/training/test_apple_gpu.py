"""Training on Apple's GPUs: what is decided, against stand-ins of torch's own functions, as no Mac is here."""

import json
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torchgen
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import foretrain as api
from foretrain.analysis.forecast_check import of_directory
from foretrain.app import calibrate as calibration
from foretrain.app import opened, training_session
from foretrain.app.plan import make_plan
from foretrain.app.trainer_forecast import new_record
from foretrain.app.tuning_session import prepare
from foretrain.base.errors import UserError
from foretrain.config.options import RunConfig
from foretrain.config.resolve import resolve
from foretrain.data.dataset import read_info
from foretrain.hardware import accelerator
from foretrain.hardware.catalogue import catalogue, find
from foretrain.hardware.devices import Target
from foretrain.measure import timed_step
from foretrain.measure.trial import config_on_cpu
from foretrain.model.step import build, evaluation_loss, make_optimizer, train_step
from foretrain.model.update import update
from foretrain.predict.plan import plan
from foretrain.runs.folder import RunDirectory
from foretrain.training import attempts, device, feed, memory_limit
from foretrain.training import ranks as group
from foretrain.training.attempts import Generators, free_memory
from foretrain.training.device import Placement, place
from foretrain.training.place import Place
from foretrain.training.trainer_meter import PhaseMeter
from tests.kit.apple import GIB, AppleGpu
from tests.kit.command import foretrain, refused
from tests.kit.tiny import TINY, tiny, write_dataset

MPS = torch.device("mps")
CPU = torch.device("cpu")


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> AppleGpu:
    return AppleGpu().put(monkeypatch)


# -- where a run happens -------------------------------------------------------------------------------------------


def test_known_chip_has_its_figures_and_metals_memory(mac: AppleGpu) -> None:
    placement = place(tiny(device="mps", compile=True))
    known = find("Apple M1 Max")
    assert placement.device == MPS
    assert (placement.gpu.name, placement.gpu.kind, placement.gpu.memory_bytes) == ("Apple M1 Max", "mps", 48 * GIB)
    assert placement.gpu.fp32_tflops == known.fp32_tflops
    assert known.source in placement.gpu.source
    assert "recommended_max_memory" in placement.gpu.source
    assert not placement.compiled
    assert {id for id, _ in placement.notes} >= {"mps_unmeasured", "no_compile"}


@pytest.mark.parametrize(("name", "cores", "told"), [
    ("Apple M9 Ultra", 99, "Apple M9 Ultra"),  # not in the catalogue
    ("Apple M1 Max", 24, "Apple M1 Max 24-core GPU"),  # another one of that name
    ("RTX 4070", 46, "RTX 4070 46-core GPU"),
])  # fmt: skip
def test_an_unknown_chip_trains_without_a_peak(mac: AppleGpu, name: str, cores: int, told: str) -> None:
    mac.name, mac.cores = name, cores
    gpu = place(tiny(device="mps")).gpu
    assert (gpu.name, gpu.kind, gpu.sm_count, gpu.memory_bytes) == (told, "mps", cores, 48 * GIB)
    assert gpu.peak_flop_per_s("bfloat16") is gpu.peak_flop_per_s("float32") is None


def test_auto_takes_no_apple_gpu_and_says_so(mac: AppleGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    placement = place(tiny(device="auto"))
    assert placement.device == CPU
    assert ("mps_not_taken", {"gpu": "Apple M1 Max"}) in placement.notes
    assert not any(id == "mps_not_taken" for id, _ in place(tiny(device="cpu")).notes)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert not any(id == "mps_not_taken" for id, _ in place(tiny(device="auto")).notes)


@pytest.mark.parametrize(("built", "id"), [(False, "environment.mps_not_built"), (True, "environment.no_mps")])
def test_without_one_it_is_said_what_is_wrong(built: bool, id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: built)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with refused(id, code=4, match="--device=cpu"):
        place(tiny(device="mps"))


@pytest.mark.parametrize(("macos", "asked", "dtype"), [
    ((14, 0), "auto", "bfloat16"), ((13, 7), "auto", "float16"), ((15, 0), "float32", "float32"),
    ((15, 0), "float16", "float16"),
])  # fmt: skip
def test_dtype_auto(mac: AppleGpu, macos: tuple[int, int], asked: str, dtype: str) -> None:
    mac.macos = macos
    assert place(tiny(device="mps", dtype=asked)).dtype == dtype


REFUSED: list[dict[str, Any]] = [
    {"optimizer_offload": True}, {"optimizer_offload": True, "gradient_offload": True},
    {"activation_checkpointing": True, "checkpoint_offload": True},
    {"optimizer_in_backward": True, "gradient_accumulation_steps": 1, "grad_clip": 0.0},
]  # fmt: skip


@pytest.mark.parametrize("options", REFUSED, ids=lambda options: max(options, key=len))
def test_what_it_cannot_do_is_refused_by_train_and_plan(mac: AppleGpu, options: dict[str, Any]) -> None:
    with refused("config.refused_here", code=2, match="Apple M1 Max"):
        place(tiny(device="mps", **options))
    with pytest.raises(UserError):
        plan(tiny(**options), find("Apple M1 Max"))
    plan(tiny(**options), find("RTX 4070"))


@pytest.mark.parametrize("mode", ["fp8", "int8", "fp16_accumulation"])
def test_modes_of_matmul_are_refused(mac: AppleGpu, mode: str) -> None:
    with refused("gpu.no_matmul_mode"):
        place(tiny(device="mps", matmul=mode, dtype="float16"))


def test_what_is_for_cuda_has_no_effect(mac: AppleGpu) -> None:
    options = {"cuda_graph": "on", "allocator_settings": "expandable_segments:True", "cpu_threads": 2}
    notes = place(tiny(device="mps", **options)).notes
    assert {values["option"] for id, values in notes if id == "no_effect_here"} == set(options)
    assert ("no_bmm", {"reason": "it only runs on CPUs"}) in place(tiny(device="mps", attention="bmm")).notes


def test_the_environment_names_the_system(mac: AppleGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ENABLE_MPS_FALLBACK", "1")
    monkeypatch.setattr(device.platform, "mac_ver", lambda: ("15.1", ("", "", ""), "arm64"))
    found = device.environment(place(tiny(device="mps")))
    assert (found["macos"], found["device"], found["PYTORCH_ENABLE_MPS_FALLBACK"]) == ("15.1", "Apple M1 Max", "1")
    assert device.identity_of(MPS) == {}
    assert device.beside_allocator(MPS) is None


def test_what_measures_a_device_does_not_pretend(mac: AppleGpu) -> None:
    for ask in (lambda: prepare(resolve(["baby", "--device=mps"])), lambda: calibration.gpu_of("mps")):
        with refused(code=4, match="not Apple GPUs"):
            ask()
    foretrain("verify", "--device=mps", code=2)


def test_ranks_on_a_mac_are_on_its_cpu(mac: AppleGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "greet", lambda *_: None)
    ranks: Any = SimpleNamespace(place=Place(rank=0, local_rank=0, world=2, local_world=2), start=lambda device: None)
    placement = group.placed(tiny(device="auto"), ranks)
    assert (placement.device, placement.notes) == (CPU, ())  # none of them may ask for --device=mps
    with refused("usage.ranks_one_device"):
        group.placed(tiny(device="mps"), ranks)


# -- what it is asked ----------------------------------------------------------------------------------------------


def test_peaks_are_those_of_the_allocator_where_it_counts_them(mac: AppleGpu) -> None:
    own = accelerator.accelerator_of(MPS)
    assert own.method == "mps allocator"
    own.reset_peaks()
    assert own.peaks() == (2 * GIB, 3 * GIB)  # Metal's own allocations are in the driver's figure
    mac.driver_bytes = 5 * GIB
    assert own.reserved() == 5 * GIB
    assert mac.told == ["reset"]


def test_record_says_where_peaks_are_sampled(mac: AppleGpu) -> None:
    mac.counts = False
    own = accelerator.accelerator_of(MPS)
    own.reset_peaks()
    assert (own.method, own.peaks()) == ("mps allocator (sampled)", (None, 3 * GIB))
    assert mac.told == []


def test_torch_answers_as_the_stand_in_for_an_old_one() -> None:
    """Here no accelerator is, of which torch says nothing: by an error, as of an allocator that counts nothing, or, from
    2.14 on, by an empty answer."""
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    with suppress(RuntimeError):
        assert not torch.accelerator.memory_stats()
    assert accelerator.accelerator_of(MPS).method == "mps allocator (sampled)"


def test_random_numbers_go_on_where_they_were(mac: AppleGpu) -> None:
    kept = Generators.now(MPS)
    mac.generator = torch.tensor([9], dtype=torch.uint8)
    kept.restore(MPS)
    assert mac.generator.tolist() == [1, 2, 3]
    accelerator.accelerator_of(MPS).restore({"cuda": torch.zeros(1, dtype=torch.uint8)})  # a checkpoint from a card
    assert mac.generator.tolist() == [1, 2, 3]
    assert Generators.now(CPU).own == {}


def test_memory_is_freed_and_limited(mac: AppleGpu) -> None:
    free_memory(MPS)
    assert mac.told == ["empty_cache"]
    placement = place(tiny(device="mps"))
    assert memory_limit.kept(placement, None) is None
    assert memory_limit.kept(placement, 12 * GIB) == ("memory_capped_mps", {"limit": 12 * GIB, "allowed": 12 * GIB})
    assert mac.fraction == 0.25
    memory_limit.kept(placement, 0)  # the least that there is: a fraction of 0 would be no limit
    assert 0 < (mac.fraction or 0) < 1e-9
    capped = memory_limit.kept(placement, 480 * GIB)  # torch takes no more than twice of what is recommended
    assert (capped[1]["allowed"], mac.fraction) == (96 * GIB, 2.0)


def test_trial_of_a_micro_batch_tells_its_reserved_bytes(mac: AppleGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    there = place(tiny(device="mps"))
    monkeypatch.setattr(timed_step, "place", lambda config: replace(there, device=CPU, dtype="float32"))
    mac.compute_on_the_cpu(monkeypatch)
    assert timed_step.try_steps(tiny(device="mps"), 12 * GIB) == (True, 3 * GIB)
    assert not config_on_cpu(tiny(device="mps"))


def test_running_out_of_memory_is_known_by_its_message() -> None:
    assert accelerator.ran_out(
        RuntimeError("MPS backend out of memory (MPS allocated: 1.00 GB). Tried to allocate 2 GB")
    )
    assert accelerator.ran_out(torch.OutOfMemoryError("CUDA out of memory."))
    assert not accelerator.ran_out(RuntimeError("something else"))


def test_an_operator_that_is_lacking_ends_in_a_sentence() -> None:
    said = "The operator 'aten::_foo.out' is not currently implemented for the MPS device. If you want this op to be …"
    found = attempts.ending_of(NotImplementedError(said), Path(), 3, lambda id: UserError(id))
    assert found.reason == "environment.mps_operator"
    assert "aten::_foo.out" in str(found.error)
    other = NotImplementedError("something else")
    assert attempts.ending_of(other, Path(), 3, lambda id: UserError(id)).error is other


def test_only_the_trainers_own_thread_uses_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The thread that reads ahead makes its batches on the host."""
    made: list[torch.device] = []
    to_batch = feed.to_batch
    monkeypatch.setattr(feed, "to_batch", lambda rows, on: made.append(on) or to_batch(rows, on))
    config = tiny(device="mps", max_iters=1, gradient_accumulation_steps=1)
    tokens, _ = feed.token_files(config, read_info(write_dataset(tmp_path / "toy")))
    with feed.Feed(tokens, torch.device("meta")) as own:
        ((inputs, targets),) = own.batches(config, 0)
    assert set(made) == {CPU}
    assert {inputs.device.type, targets.device.type} == {"meta"}


def test_callback_names_the_gpu_and_measures_no_cpu(mac: AppleGpu) -> None:
    model = torch.nn.Linear(2, 2)
    meter = PhaseMeter(model, MPS)
    meter.load()
    meter.begin("steady_step")
    meter.done()
    meter.end()
    assert meter.found == {}
    arguments: Any = SimpleNamespace(run_name="a", output_dir="a", to_dict=dict)
    record = new_record(None, arguments, SimpleNamespace(max_steps=3, global_step=0), model, MPS)
    assert (record.device, record.kind) == ("Apple M1 Max", "mps")


# -- the step ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("latched", [False, True])
def test_an_update_is_held_back_by_kernels_that_do_not_look(
    norm: float, latched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGD never looks at found_inf, as MPS's fused AdamW did not."""
    monkeypatch.setattr(accelerator, "accelerator_of", lambda device: accelerator.Mps(MPS))
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    optimizer = torch.optim.SGD([weight], lr=0.5)
    latch = torch.tensor(float(latched))
    held = update(optimizer, torch.tensor(1.0), torch.tensor(norm), latch, overflow_is_normal=False)
    good = norm == 1.0 and not latched
    assert float(held) == float(not good)
    assert weight.tolist() == [0.5 if good else 1.0] * 3
    assert not hasattr(optimizer, "found_inf")


def test_adamw_is_fused_where_torch_has_a_fused_one() -> None:
    assert "mps" in _get_fused_kernels_supported_devices()
    assert make_optimizer(torch.nn.Linear(2, 2), tiny(), "mps").defaults["fused"]


def _mps_kernel(table: dict[str, str], name: str) -> bool:
    """Whether torch's own table has a kernel of an operator for MPS, or one made of other operators."""
    block = table[name]
    keys = {key.strip() for line in re.findall(r"^    ([A-Z][\w, ]+):", block, re.MULTILINE) for key in line.split(",")}
    delegate = re.search(r"structured_delegate: (\S+)", block)
    if "MPS" in keys or any(key.startswith("Composite") for key in keys):
        return True
    return _mps_kernel(table, delegate[1]) if delegate else "dispatch:" not in block


class _Operators(TorchDispatchMode):
    """The operators that run on tensors, and those that take or give fp64, which Metal has not."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.wide: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name, tensors = str(func).removeprefix("aten.").removesuffix(".default"), tree_leaves((args, kwargs, out))
        tensors = [x for x in tensors if isinstance(x, torch.Tensor)]
        self.names |= {name} if tensors else set()
        self.wide |= {name} if any(x.dtype == torch.float64 for x in tensors) else set()
        return out


@pytest.fixture(scope="module")
def table() -> dict[str, str]:
    text = (Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml").read_text("utf-8")
    return {block.split("(")[0]: block for block in text.split("\n- func: ")[1:]}


STEPS: list[dict[str, Any]] = [
    {"dropout": 0.1}, {"recipe": "modern"}, {"recipe": "llama", "n_kv_head": 1}, {"recipe": "nanochat"},
    {"optimizer": "muon"}, {"optimizer": "adamw8bit", "n_embd": 64}, {"optimizer": "adamw4bit", "n_embd": 64},
    {"loss_chunk_size": 16}, {"master_weights": True}, {"activation_checkpointing": True}, {"recompute_norm_gelu": True},
]  # fmt: skip


@pytest.mark.parametrize("options", STEPS, ids=lambda options: "-".join(map(str, options.values())))
def test_torch_has_every_operator_of_a_step_for_mps(options: dict[str, Any], table: dict[str, str]) -> None:
    """With attention as PyTorch computes it there in training: of plain operators."""
    state = build(tiny(**options), CPU, torch.bfloat16, compile=False)
    batches = [(torch.randint(96, (4, 16)), torch.randint(96, (4, 16))) for _ in range(2)]
    if state.config.optimizer.startswith("adamw"):
        train_step(state, batches, 1e-3)  # tables of the codes are made on the host, with fp64
    with sdpa_kernel(SDPBackend.MATH), _Operators() as seen:
        train_step(state, batches, 1e-3)
        evaluation_loss(state, batches[0])
    assert len(seen.names) > 30
    assert [name for name in seen.names if not _mps_kernel(table, name)] == []
    assert seen.wide == set()


# -- a run, and what is said of it afterwards ----------------------------------------------------------------------


@pytest.fixture
def run(mac: AppleGpu, monkeypatch: pytest.MonkeyPatch, own_directory: Path) -> Path:
    """A run that was recorded on an Apple GPU, though a CPU computed it."""
    write_dataset(own_directory / "data" / "toy")
    _train(mac, monkeypatch, {**TINY, "dropout": 0.1, "out_dir": "apple"})
    return own_directory / "apple"


def _train(mac: AppleGpu, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], **more: Any) -> Any:
    def on_the_mac(config: RunConfig) -> Placement:
        there = place(config.model_copy(update={"device": "mps", "compile": False}))
        return Placement(CPU, there.gpu, there.dtype, there.compiled, there.notes)

    monkeypatch.setattr(training_session, "place", on_the_mac)
    mac.compute_on_the_cpu(monkeypatch)
    return api.train(options, **more)


def test_a_run_is_recorded_as_on_an_apple_gpu(run: Path) -> None:
    record = RunDirectory(run).read_record()
    assert (record.status, record.gpu.kind, record.dtype, record.compiled) == ("finished", "mps", "bfloat16", False)
    assert record.memory.method == "mps allocator"
    assert {phase.phase for phase in record.memory.phases} >= {"first_step", "steady_step", "evaluate_first"}
    assert all(phase.reserved_bytes == 3 * GIB for phase in record.memory.phases)
    assert record.highest_bytes == 3 * GIB
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {line["memory_bytes"] for line in lines if line["kind"] == "step"} == {3 * GIB}
    assert not any("power_w" in line for line in lines)
    events = [json.loads(line)["id"] for line in (run / "events.jsonl").read_text().splitlines()]
    assert "mps_unmeasured" in events


def test_commands_read_it(run: Path, mac: AppleGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    _train(mac, monkeypatch, {**TINY, "dropout": 0.1, "seed": 2, "out_dir": "other"})
    explained = foretrain("explain", "apple", code=0)
    assert "Measured: mps allocator." in explained.stdout
    assert "reserved by PyTorch" in explained.stdout
    assert "foretrain calibrate" not in explained.stdout  # which refuses it
    compared = foretrain("compare", "apple", "other", "--json", code=0)
    assert [side["memory_what"] for side in json.loads(compared.stdout)["sides"]] == ["reserved", "reserved"]
    assert foretrain("report", "apple", "--out", "r.html").returncode == 0
    assert "sensors of NVIDIA cards only" in Path("r.html").read_text("utf-8")
    assert foretrain("runs").returncode == 0
    made = api.plan(str(Path("apple/config.toml")), RunDirectory(run).read_record().gpu)
    assert (made.gpu.name, made.dtype, made.available_bytes) == ("Apple M1 Max", "bfloat16", 48 * GIB)


def test_its_forecast_is_held_against_what_its_allocator_said(run: Path) -> None:
    _, made, check = of_directory(RunDirectory(run))
    assert check.measured_source == "mps allocator"
    measured = {row.id: row.measured for row in check.memory}
    assert measured["process.reserved"] == 3 * GIB
    assert measured["phase.steady_step"] == 2 * GIB
    assert not made.compiled


def test_sampling_is_where_the_run_was_trained(run: Path, mac: AppleGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    record = RunDirectory(run).read_record()
    assert opened.device_for(record.gpu) == MPS
    assert opened.device_for(find("RTX 4070")) == CPU
    monkeypatch.setattr(opened, "available_memory_bytes", lambda: 64 * GIB)
    assert opened.room_bytes(MPS) == 45 * GIB
    monkeypatch.setattr(opened, "available_memory_bytes", lambda: 8 * GIB)  # others use the rest
    assert opened.room_bytes(MPS) == 8 * GIB
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert opened.device_for(record.gpu) == CPU


# -- plans ---------------------------------------------------------------------------------------------------------


def test_a_plan_is_of_what_the_trainer_does_there() -> None:
    for gpu in (gpu for gpu in catalogue().values() if gpu.kind == "mps"):
        made = make_plan(resolve(["gpt2-124m", "--memory_limit=24GB"]), Target(gpu, 0))
        assert (made.dtype, made.compiled) == ("bfloat16", False)
        ids = [note.id for note in made.notes]
        assert {"mps_as_cuda", "mps_eager"} <= set(ids)
        assert "memory_unknown" not in ids  # the limit says it
        assert made.verdict_of("foretrain") != "unknown"


def test_attention_saves_its_scores() -> None:
    """No fused kernel of MPS goes backward: the scores of every head wait for the backward pass."""
    short, long = (plan(tiny(block_size=T, n_layer=1, n_head=2, n_embd=32, batch_size=1), find("Apple M1 Max")).memory_of(
        "foretrain").saved_bytes for T in (64, 512))  # fmt: skip
    card = plan(tiny(block_size=512, n_layer=1, n_head=2, n_embd=32, batch_size=1, dtype="bfloat16"), find("RTX 4070"))
    assert long > 8 * short  # quadratic, where all else is linear
    assert long - (card.memory_of("foretrain").saved_bytes or 0) >= 2 * 512 * 512 * 2


def test_the_next_command_asks_for_it() -> None:
    done = foretrain("plan", "baby", "--gpu", "Apple M1 Max", "--memory_limit=24GB", code=0)
    assert "--device=mps" in done.stdout
