"""What a run takes that learns from completions of its own (GRPO), beside the steps: memory and time. No torch.

TRL's GRPOTrainer, _generate_and_score_completions: transformers' `generate` writes the completions of several
micro-batches at once, with a cache of keys and values that a step copies to one that is a token longer; then the model
that wrote them, where it may be another by then, and the reference run over them a micro-batch at a time. vLLM has a
share of the card's memory for itself.
"""

from typing import Any

from foretrain.config.finetune.options import FineTune
from foretrain.config.inference import Inference
from foretrain.hardware.catalogue import Gpu
from foretrain.predict.inference.speed import speed_of
from foretrain.predict.speed.ops import Operation, flops
from foretrain.predict.speed.rates import Rates, busy_s
from foretrain.predict.timeline import Size, Tensor

LEAPS = 8  # in which a cache grows here: each copy is as a step's, which has one old tensor beside the new one


def vllm_bytes(tune: FineTune, gpu: Gpu) -> int:
    colocated = tune.generates and tune.vllm == "colocate"
    return round(tune.vllm_memory * (gpu.memory_bytes or 0)) if colocated else 0


def passes_of(tune: FineTune) -> list[str]:
    """Return whose log-probabilities are made before a step."""
    return ["again"] * tune.scores_again + ["reference"] * tune.references


class Completions:
    """The completions that are there. `run`: a SimulatedFineTuning."""

    def __init__(self, run: Any) -> None:
        self.run, self.tune, self.t = run, run.tune, run.t
        self.held: list[Tensor] = []
        self.share_bytes = vllm_bytes(self.tune, run.gpu)

    def start_vllm(self) -> None:
        """Take its share for good, where it never sleeps."""
        if self.share_bytes and not self.tune.vllm_sleep:
            self.run.alloc("vllm", self.share_bytes)

    def write(self, rows: int, batch: int, *, phases: bool = True) -> None:
        """Generate and score so many completions, in micro-batches; `phases`: these are phases of their own."""
        t, tune = self.t, self.tune
        if phases:
            t.phase("generate")
        t.at("generate")
        if tune.vllm == "no":
            self._generate(rows)
        elif self.share_bytes and tune.vllm_sleep:
            t.empty_cache()
            t.free(self.run.alloc("vllm", self.share_bytes))
            t.empty_cache()
        if phases and passes_of(tune):
            t.phase("score")
        found = [self._of(16 * rows * tune.seq_len)]
        t.use(self.run.symbols_for(batch))
        t.at("forward.blocks")
        joined = self._of(16 * rows * tune.seq_len)  # prompts with their completions
        for name in passes_of(self.tune):
            for _ in range(min(2, -(-rows // batch))):
                passage = self.run.passage(train=False, before=name)
                self.run.keep(passage, *[t.play(passage, 0)] * 2)
            found.append(self._of(4 * rows * tune.completion_tokens))
        t.free(*self.held, joined)
        self.held = found

    def _of(self, nbytes: int) -> Tensor:
        return self.run.alloc("batch", nbytes)

    def _generate(self, rows: int) -> None:
        t, tune, facts = self.t, self.tune, self.run.facts
        prompt = tune.seq_len - tune.completion_tokens
        t.use(self.run.symbols_for(rows, prompt))
        passage = self.run.passage(train=False, before="prompt")
        shift = t.play(passage, 0)
        self.run.keep(passage, shift, shift)
        cached = [(s, *passage.kinds[s]) for s in passage.left if passage.kinds[s][0] == "kv_cache"]
        held = [t.adopt(component, size, serial + shift) for serial, component, size in cached]
        each = facts.n_kv_head * facts.head_dim * rows
        widths = [round(size.nbytes / (each * prompt)) for _, _, size in cached]
        for leap in range(1, LEAPS + 1):
            tokens = prompt + (tune.completion_tokens - 1) * leap // LEAPS
            for i, width in enumerate(widths):
                short = i // 2 in facts.sliding_layers
                count = min(tokens, facts.sliding_window) if short else tokens
                letters = "" if short else f"{width}·N·T·K·D"
                new = t.alloc("kv_cache", Size(letters or str(width * each * count), t.rounded(width * each * count)))
                t.free(held[i])
                held[i] = new
        wide = tune.padded and tune.attn != "flash_attention_2" and facts.groups > 1
        t.free(*[self.run.alloc("temporaries", facts.groups * held[0].size.nbytes) for _ in range(2 * wide)])
        # autocast keeps its copies of all weights until a step ends, whose logits become fp32 probabilities
        copies = [t.alloc(component, size) for component, size in passage.kinds if component == "weight_copies"]
        logits = rows * facts.vocab_size
        made = [self.run.alloc("logits", width * logits) for width in (self.run.program.logit_bytes, 4, 4)]
        t.free(*copies, *made, *held)
        t.use(self.run.symbols)


class GenerationWork:
    """What a step's completions take, of those that are generated for several steps their share. `work`: a StepWork.

    A token takes its kernels or their launches, whichever is longer; transformers also copies the cache, so that it is
    read twice and written. vLLM's time is that of foretrain's own inference. Nobody has measured these times here.
    """

    def __init__(self, work: Any) -> None:
        tune = work.tune
        rows, prompt = tune.generated, tune.seq_len - tune.completion_tokens
        self.work, self.rows, self.prompt = work, rows, prompt
        self.share = tune.grad_accum / (tune.micro_batches_generated * tune.num_iterations)
        self.scoring = [op for name in passes_of(tune) for op in work.before(name)]
        self.scored = rows / tune.batch_size * self.share  # micro-batches of a step
        self.beginning = work.before("prompt", {"B": rows, "T": prompt})
        self.token = work.before("prompt", {"B": rows, "T": 1})

    @property
    def flops(self) -> int:
        own = flops(self.beginning) + self.work.tune.completion_tokens * flops(self.token)
        return round(self.scored * flops(self.scoring) + self.share * own)

    def time_s(self, rates: Rates, slower: float, host: float) -> tuple[float, float]:
        """Return a step's seconds for generation, and for what scores it."""
        launch_s = rates.launch_s(compiled=False)

        def longer(operations: list[Operation]) -> float:
            launches_s = launch_s * sum(op.runs for op in operations) + rates.python_s
            return max(slower * busy_s(operations, rates), host * launches_s)

        scored_s = self.scored * longer(self.scoring) if self.scoring else 0.0
        return self.share * self._written_s(rates, slower, longer), scored_s

    def _written_s(self, rates: Rates, slower: float, longer: Any) -> float:
        tune, facts, gpu = self.work.tune, self.work.program.facts, self.work.gpu
        if tune.vllm != "no":
            asked = Inference(
                weights="nf4" if tune.method == "qlora" else "bf16", kv="bf16", batch=self.rows, prompt=self.prompt,
                context=tune.seq_len,
            )  # fmt: skip
            found = speed_of(facts, asked, "pytorch", gpu)
            return slower * (found.prompt_s + tune.completion_tokens * found.step_s.expected_s) if found else 0.0
        middle = self.prompt + tune.completion_tokens // 2
        cached = 4 * self.rows * facts.n_kv_head * facts.head_dim * facts.cached_tokens(middle)
        copied = Operation("cache", "add", "forward", 1, (cached,), "bfloat16", 0, 2 * cached, cached)
        return longer(self.beginning) + tune.completion_tokens * (longer(self.token) + slower * rates.time_s(copied))
