"""A decoder of Hugging Face's, from the facts of its config.json: every family that foretrain knows, in one file.

It runs the operations that transformers' own code runs (models/*/modeling_*.py, 5.x), in its order, and keeps a tensor
as long as that code does. So the estimate, which runs this code on tensors without values, allocates what the real
model allocates; tests hold its logits and its memory against transformers.

Shapes: B micro-batch, T tokens, N = B·T, C width, H heads of queries, K heads of keys and values, D width of a head,
F width inside the MLP, V vocabulary.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from foretrain.config.hub.facts import LEAST_OFFLOADED_BYTES, Liger, Unsloth
from foretrain.model.hub import liger, unsloth
from foretrain.model.hub.experts import Experts, Router, balance
from foretrain.model.hub.kernels import offloaded
from foretrain.model.hub.layers import (
    BareNorm,
    FastNorm,
    GemmaNorm,
    OlmoNorm,
    RMSNorm,
    activation,
    apply_fp32_rotary,
    apply_rotary,
    mask_as_bias,
    repeat_heads,
    rotary_tables,
    rotate_half,
    rotate_pairs,
    window_mask,
)
from foretrain.model.hub.linear import Adapter, Conv1D, Linear4bit, Linear8bit, Lora, Packed
from foretrain.model.hub.tiles import TiledLoss, Turn
from foretrain.model.hub.unsloth_loss import ChunkedLoss, whole_loss

FP32_WEIGHTED = ("olmo2", "olmo3", "helium")  # norms that multiply before they give up single precision
HOLDING = ("gpt2", "gpt_bigcode")  # blocks that hold what attention gave until they end
# What is rotated is joined to the other columns, even where there are none.
JOINING = ("gpt_neox", "phi", "phi3", "glm", "glm4")


class Build:
    """How layers are built. `adapted`: roles of linear layers that get an adapter; `packed`: the 4-bit form of the
    blocks' weights; `cached`: in which modes (training or not) keys and values are copied."""

    def __init__(
        self,
        adapter: Adapter | None = None,
        adapted: frozenset[str] = frozenset(),
        packed: Packed | None = None,
        liger: Liger | None = None,
        unsloth: Unsloth | None = None,
        cached: tuple[bool, ...] = (),
    ) -> None:
        self.adapter, self.adapted, self.packed = adapter, adapted, packed
        self.liger, self.unsloth, self.cached = liger, unsloth, cached

    @property
    def fast_blocks(self) -> bool:
        return self.unsloth is not None and self.unsloth.blocks

    @property
    def rotary(self) -> Callable[..., tuple[Tensor, Tensor]] | None:
        if self.fast_blocks:
            return unsloth.rotary
        return liger.rotary if self.liger is not None else None

    def grouped(self, group: str, *layers: nn.Module) -> tuple[Lora, ...]:
        found = tuple([layer for layer in layers if isinstance(layer, Lora) and layer.adapted()])
        if self.unsloth is None or group not in self.unsloth.lora or len(found) < len(layers):
            return ()
        for layer in found:
            if isinstance(layer.base_layer, Linear4bit):
                layer.base_layer.in_place_of_all = layer.lora_dropout is None
        return found

    def linear(self, role: str, n_in: int, n_out: int, bias: bool, conv1d: bool = False) -> nn.Module:
        layer: nn.Module
        if self.packed is not None:
            kind = Linear8bit if self.packed.bits == 8 else Linear4bit
            layer = kind(n_in, n_out, bias, self.packed)
        else:
            layer = Conv1D(n_in, n_out) if conv1d else nn.Linear(n_in, n_out, bias=bias)
        if self.adapter is not None and role in self.adapted:
            return Lora(layer, n_in, n_out, self.adapter)
        return layer

    def head(self, facts: Any) -> nn.Module:
        layer = nn.Linear(facts.n_embd, facts.vocab_size, bias=facts.head_bias)
        if self.adapter is not None and "head" in self.adapted:
            return Lora(layer, facts.n_embd, facts.vocab_size, self.adapter)
        return layer

    def norm(self, facts: Any, width: int, *, of_heads: bool = False, last: bool = False) -> nn.Module:
        own = self.liger
        if self.unsloth is not None and self.fast_blocks:
            return FastNorm(width, partial(unsloth.rms_norm, in_place=self.unsloth.in_place))
        if own is not None and (own.heads or not of_heads):
            return FastNorm(width, partial(liger.rms_norm, in_place=own.last_in_place if last else own.in_place))
        if facts.norm == "layer":
            return nn.LayerNorm(width, bias=facts.norm_bias) if facts.norm_affine else BareNorm(width)
        if facts.model_type in FP32_WEIGHTED:
            return OlmoNorm(width)
        return GemmaNorm(width) if facts.norm == "gemma_rms" else RMSNorm(width)


def adapted_layers(layers: tuple[Lora, ...]) -> list[unsloth.Adapted]:
    return [found for layer in layers if (found := layer.adapted())]


class Attention(nn.Module):
    """Causal self-attention, with grouped queries where the facts have them (arXiv:2305.13245)."""

    def __init__(self, facts: Any, layer: int, build: Build) -> None:
        super().__init__()
        f = self.facts = facts
        self.layer, self.rotary = layer, f.positions == "rotary" and layer not in f.layers_without_rotary
        joins = f.rotary_dim > 0 or f.model_type in JOINING
        self.rotary_dim = (f.rotary_dim or f.head_dim) if joins else 0
        self.windowed = layer in f.sliding_layers
        self.rotate, self.cached = build.rotary, build.cached
        heads, kv = f.n_head * f.head_dim, f.n_kv_head * f.head_dim
        if f.fused_qkv:
            self.qkv_proj = build.linear("qkv", f.n_embd, heads + 2 * kv, f.qkv_bias, f.conv1d)
        else:
            self.q_proj = build.linear("q", f.n_embd, heads, f.qkv_bias)
            self.k_proj = build.linear("k", f.n_embd, kv, f.qkv_bias)
            self.v_proj = build.linear("v", f.n_embd, kv, f.qkv_bias)
        self.o_proj = build.linear("out", heads, f.n_embd, f.out_bias, f.conv1d)
        if f.qk_norm:
            self.q_norm = build.norm(f, f.head_dim if f.qk_norm == "head" else heads, of_heads=True)
            self.k_norm = build.norm(f, f.head_dim if f.qk_norm == "head" else kv, of_heads=True)
        self.together = () if f.fused_qkv else build.grouped("qkv", self.q_proj, self.k_proj, self.v_proj)
        self.whole_out = build.grouped("out", self.o_proj)
        self.norms_turned = f.qk_norm == "head" and build.fast_blocks

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor] | None, mask: Tensor | None) -> Tensor:
        B, T = x.shape[0], x.shape[1]
        q, k, v = self.split(x, B, T) if self.facts.fused_qkv else self.projected(x)
        if tables is not None and self.rotary and self.norms_turned:
            q, k = self.normed_and_turned(q, k, *tables)
        elif tables is not None and self.rotary and self.rotate is not None:
            q, k = self.rotate(q, k, *tables)
        elif tables is not None and self.rotary:
            q, k = self.turned(q, k, *tables)
        if self.facts.qk_norm_after == "rotary":
            q, k = self.q_norm(q), self.k_norm(k)
        if self.facts.scaled_queries:
            q = q * self.query_scale(q)
        if self.training in self.cached:
            # a cache has the dtype of its keys, which rotation within autocast makes wider than values
            k, v = self.kept = torch.cat([k], dim=-2), torch.cat([v], dim=-2) if v.dtype == k.dtype else v.to(k.dtype)
        y = self.attend(q, k, v, mask)
        y = y.reshape(B, T, self.facts.n_head * self.facts.head_dim)
        y = unsloth.lora_out(y, *adapted_layers(self.whole_out)) if self.whole_out else self.o_proj(y)
        if self.training and self.facts.residual_dropout:
            y = F.dropout(y, self.facts.residual_dropout)
        return y

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, B x heads x T x D, each by its own matrix. Gemma's norms come after all."""
        f = self.facts
        if self.together or self.norms_turned:
            return self.fast_projected(x)
        first, late = f.qk_norm and f.qk_norm_after == "view", f.qk_norm_after == "transpose"
        q = self.headed(self.q_proj(x), f.n_head, self.q_norm if first else None)
        k = self.headed(self.k_proj(x), f.n_kv_head, self.k_norm if first else None)
        v = self.headed(self.v_proj(x), f.n_kv_head, None)
        if late:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v

    def fast_projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        f = self.facts
        if self.together:
            q, k, v = unsloth.lora_qkv(x, *adapted_layers(self.together))
        else:
            q, k = self.q_proj(x), self.k_proj(x)
            v = self.v_proj(x)
        q, k = self.headed(q, f.n_head, None), self.headed(k, f.n_kv_head, None)
        v = self.headed(v, f.n_kv_head, None)
        return (q.transpose(1, 2), k.transpose(1, 2), v) if self.norms_turned else (q, k, v)

    def normed_and_turned(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Norm and rotate B x T x heads x D as unsloth does: by one kernel on a card that trains no norm."""
        norms: Any = self.q_norm, self.k_norm
        of_q, of_k = (norm.weight for norm in norms)
        if q.is_cuda and not of_q.requires_grad and not of_k.requires_grad:
            return unsloth.normed_rotary(q, k, of_q, of_k, cos, sin)
        q, k = self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(1, 2)
        return unsloth.rotary(q, k, cos, sin)

    def headed(self, x: Tensor, heads: int, norm: nn.Module | None) -> Tensor:
        """Turn B x T x (heads · D) to B x heads x T x D, normed whole or head by head."""
        whole = self.facts.qk_norm == "whole"
        if norm is not None and whole:
            x = norm(x)
        x = x.view(x.shape[0], x.shape[1], heads, self.facts.head_dim)
        if norm is not None and not whole:
            x = norm(x)
        return x.transpose(1, 2)

    def split(self, x: Tensor, B: int, T: int) -> tuple[Tensor, Tensor, Tensor]:
        f = self.facts
        qkv = self.qkv_proj(x)
        if f.model_type == "gpt_neox":
            q, k, v = qkv.view(B, T, f.n_head, 3 * f.head_dim).transpose(1, 2).chunk(3, dim=-1)
            return q, k, v
        width, kv = f.n_head * f.head_dim, f.n_kv_head * f.head_dim
        q, k, v = qkv.split([width, kv, kv], dim=-1)
        q = q.view(B, T, f.n_head, f.head_dim).transpose(1, 2)
        return q, *(part.view(B, T, f.n_kv_head, f.head_dim).transpose(1, 2) for part in (k, v))

    def query_scale(self, q: Tensor) -> Tensor:
        """Return 1 + log(1 + position / 16384) · beta, T x 1, in the dtype of the queries."""
        positions = torch.arange(q.shape[-2], device=q.device)
        return (((positions / 16384).floor() + 1).log() * 0.1 + 1)[:, None].to(q.dtype)

    def turned(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        width, rotary = self.rotary_dim, self.facts.rotary
        if rotary != "halves":  # one number for each pair of columns
            cos, sin = (x[..., : x.shape[-1] // 2].repeat_interleave(2, dim=-1) for x in (cos, sin))
        if rotary == "pairs_fp32":
            turned_q, turned_k = apply_fp32_rotary(q, cos, sin), apply_fp32_rotary(k, cos, sin)
            return turned_q.to(q.dtype), turned_k.to(k.dtype)
        rotate = rotate_half if rotary == "halves" else rotate_pairs
        if not width:
            return apply_rotary(q, cos, sin, rotate), apply_rotary(k, cos, sin, rotate)
        q, k = (torch.cat((apply_rotary(x[..., :width], cos, sin, rotate), x[..., width:]), dim=-1) for x in (q, k))
        return q, k

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        groups = self.facts.groups
        dropout = self.facts.attention_dropout if self.training else 0.0
        if self.facts.written_attention:
            return self.written(q, repeat_heads(k, groups), repeat_heads(v, groups), mask, dropout)
        grouped = groups > 1 and mask is None and k.shape[-1] <= 256
        if groups > 1 and not grouped:
            k, v = repeat_heads(k, groups), repeat_heads(v, groups)
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, enable_gqa=grouped
        )
        return y.transpose(1, 2).contiguous()

    def written(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
        weights = torch.matmul(q, k.transpose(2, 3)) * self.facts.head_dim**-0.5
        if self.facts.attention_softcap:
            weights = torch.tanh(weights / self.facts.attention_softcap) * self.facts.attention_softcap
        if mask is not None:
            weights = weights + mask
        weights = F.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype)
        weights = F.dropout(weights, dropout, self.training)
        y = torch.matmul(weights, v)
        return y.transpose(1, 2).contiguous()


class GatedMLP(nn.Module):
    """act(gate(x)) · up(x), then down (arXiv:2002.05202)."""

    def __init__(self, facts: Any, build: Build, width: Any = None) -> None:
        super().__init__()
        f = facts
        width = f.mlp_width if width is None else width
        self.act, self.fused, self.one_kernel = activation(f.activation), f.fused_gate_up, build.liger is not None
        self.dropout = f.residual_dropout if f.model_type == "seed_oss" else 0.0
        if f.fused_gate_up:
            self.gate_up_proj = build.linear("gate_up", f.n_embd, 2 * width, f.mlp_bias)
        else:
            self.gate_proj = build.linear("gate", f.n_embd, width, f.mlp_bias)
            self.up_proj = build.linear("up", f.n_embd, width, f.mlp_bias)
        self.down_proj = build.linear("down", width, f.n_embd, f.mlp_bias)
        self.together = () if self.fused else build.grouped("mlp", self.gate_proj, self.up_proj, self.down_proj)

    def forward(self, x: Tensor) -> Tensor:
        if self.together:
            return unsloth.lora_mlp(x, *adapted_layers(self.together))
        if not self.fused and self.one_kernel:
            return self.down_proj(liger.gated_product(self.gate_proj(x), self.up_proj(x)))
        if not self.fused:
            x = self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))
            return F.dropout(x, self.dropout, self.training) if self.dropout else x
        up = self.gate_up_proj(x)
        gate, up = up.chunk(2, dim=-1)
        if self.one_kernel:
            return self.down_proj(liger.gated_product(gate, up))
        up = up * self.act(gate)
        return self.down_proj(up)


class PlainMLP(nn.Module):
    def __init__(self, facts: Any, build: Build) -> None:
        super().__init__()
        f = facts
        self.act, self.dropout = activation(f.activation), f.residual_dropout
        self.up_proj = build.linear("fc", f.n_embd, f.mlp_width, f.mlp_bias, f.conv1d)
        self.down_proj = build.linear("down", f.mlp_width, f.n_embd, f.mlp_bias, f.conv1d)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up_proj(x)
        x = self.act(x)
        x = self.down_proj(x)
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class Mixture(nn.Module):
    """A mixture of experts instead of an MLP, with a shared expert where the facts have one."""

    def __init__(self, facts: Any, build: Build) -> None:
        super().__init__()
        f, adapter = facts, build.adapter
        self.gate = Router(f, adapter if "router" in build.adapted else None)
        self.experts = Experts(f, activation(f.activation), adapter, build.adapted)
        self.shares = bool(f.shared_expert_width)
        if self.shares:
            self.shared_expert = GatedMLP(f, build, f.shared_expert_width)
            self.shared_expert_gate = build.linear("shared_gate", f.n_embd, 1, False)

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape
        x = x.view(-1, shape[-1])
        shared = self.shared_expert(x) if self.shares else None
        shares, chosen = self.gate(x)
        made = self.experts(x, chosen, shares)
        if shared is not None:
            shared = torch.sigmoid(self.shared_expert_gate(x)) * shared
            made = made + shared
        return made.reshape(shape)


def make_mlp(facts: Any, layer: int, build: Build) -> nn.Module:
    if facts.n_expert and layer not in facts.dense_layers:
        return Mixture(facts, build)
    return GatedMLP(facts, build) if facts.mlp == "gated" else PlainMLP(facts, build)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); norms after or beside the parts where the model has them there."""

    def __init__(self, facts: Any, layer: int, build: Build) -> None:
        super().__init__()
        self.norms, self.scaled, self.holds = facts.norms, facts.scaled_residual, facts.model_type in HOLDING
        self.self_attn = Attention(facts, layer, build)
        self.mlp = make_mlp(facts, layer, build)
        if facts.norms != "post":
            self.input_layernorm = build.norm(facts, facts.n_embd)
        self.post_attention_layernorm = build.norm(facts, facts.n_embd)
        if facts.norms == "sandwich":
            self.pre_feedforward_layernorm = build.norm(facts, facts.n_embd)
        if facts.norms != "pre":
            self.post_feedforward_layernorm = build.norm(facts, facts.n_embd)

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor] | None, mask: Tensor | None) -> Tensor:
        before = self.norms != "post"
        residual = x
        x = self.self_attn(self.input_layernorm(x) if before else x, tables, mask)
        attended = x if self.holds else None
        if self.norms != "pre":
            x = self.post_attention_layernorm(x)
        x = residual + (x * 0.5 if self.scaled else x)
        residual = x
        if self.norms == "pre":
            x = self.post_attention_layernorm(x)
        elif before:
            x = self.pre_feedforward_layernorm(x)
        x = self.mlp(x)
        if self.norms != "pre":
            x = self.post_feedforward_layernorm(x)
        del attended
        return residual + (x * 0.5 if self.scaled else x)


class ParallelBlock(nn.Module):
    def __init__(self, facts: Any, layer: int, build: Build) -> None:
        super().__init__()
        self.self_attn = Attention(facts, layer, build)
        self.mlp = make_mlp(facts, layer, build)
        self.input_layernorm = build.norm(facts, facts.n_embd)
        self.shared = facts.shared_norm
        if not self.shared:
            self.post_attention_layernorm = build.norm(facts, facts.n_embd)

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor] | None, mask: Tensor | None) -> Tensor:
        if self.shared:
            residual = x
            x = self.input_layernorm(x)
            attended = self.self_attn(x, tables, mask)
            x = self.mlp(x)
            return attended + x + residual
        attended = self.self_attn(self.input_layernorm(x), tables, mask)
        made = self.mlp(self.post_attention_layernorm(x))
        return made + attended + x


class Decoder(nn.Module):
    """The model with its loss. `reentrant`: checkpointing by the older implementation; `offloads`: block inputs are on
    the host until backward; `tiled`: the loss is TRL's; `keeps_logits`: an evaluation wants them; `returns_logits`:
    beside the loss."""

    def __init__(
        self,
        facts: Any,
        build: Build | None = None,
        *,
        checkpointing: bool = False,
        reentrant: bool = False,
        offloads: bool = False,
        keeps_logits: bool = False,
        tiled: bool = False,
    ) -> None:
        super().__init__()
        f, build = facts, build or Build()
        self.facts, self.checkpointing, self.reentrant = facts, checkpointing, reentrant or offloads
        self.offloads, self.first_pass = offloads, False
        self.embed_tokens = nn.Embedding(f.vocab_size, f.n_embd)
        if f.positions == "learned":
            self.embed_positions = nn.Embedding(f.max_positions, f.n_embd)
        kind = ParallelBlock if f.parallel else Block
        self.layers = nn.ModuleList([kind(f, i, build) for i in range(f.n_layer)])
        self.norm = build.norm(f, f.n_embd, last=True)
        self.lm_head: Any = build.head(f)
        if f.tied:
            getattr(self.lm_head, "base_layer", self.lm_head).weight = self.embed_tokens.weight
        self.build, self.keeps_logits, self.tiled, self.returns_logits = build, keeps_logits, tiled, False
        self.chunks = build.unsloth is not None
        self.kept_tables = [torch.empty(int(f.max_positions), f.head_dim) for _ in range(2)]
        if tiled:
            self.chunked_loss = TiledLoss()
        elif self.chunks:
            self.chunked_loss = ChunkedLoss()
        elif build.liger is not None and build.liger.loss == "fused":
            self.chunked_loss = liger.FusedLoss()

    def embedded(self, idx: Tensor, positions: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        f = self.facts
        x = self.embed_tokens(idx)
        within = f.norm == "gemma_rms"  # Gemma's embedding multiplies its own output
        if f.scaled_embedding and within:
            x = x * (f.n_embd**0.5)
        if self.checkpointing or self.build.fast_blocks:
            x.requires_grad_(True)  # frozen ones too (enable_input_require_grads)
        if f.scaled_embedding and not within:
            x = x * (f.n_embd**0.5)
        parts = (x,)
        if f.positions == "learned":
            parts = x, self.embed_positions(positions)
            x = parts[0] + parts[1]
        return F.dropout(x, f.embedding_dropout, self.training) if f.embedding_dropout else x, parts

    def states(self, idx: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return B x T x C before the head. transformers' models hold `position_ids` and embeddings until here."""
        f, T = self.facts, idx.shape[1]
        if positions is None:
            positions = (torch.arange(T, device=idx.device) + 0)[None]
        x, embedded = self.embedded(idx, positions)
        masks = self.masks(idx.shape[0], T, x)
        tables = self.tables(positions, x) if f.positions == "rotary" else None
        for i, block in enumerate(self.layers):
            if self.checkpointing and self.training and self.goes_to_host(x, i):
                x = offloaded(block, x, tables, masks[i in f.sliding_layers])
            elif self.checkpointing and self.training:
                x = checkpoint(block, x, tables, masks[i in f.sliding_layers], use_reentrant=self.reentrant)
            else:
                x = block(x, tables, masks[i in f.sliding_layers])
        x = self.norm(x)
        del embedded, positions
        return x

    def tables(self, positions: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.build.fast_blocks:
            return self.kept_tables[0][: x.shape[1]], self.kept_tables[1][: x.shape[1]]
        dtype = torch.float32 if self.facts.rotary == "pairs_fp32" else x.dtype
        return rotary_tables(positions, self.facts.rotary_dim or self.facts.head_dim, dtype)

    def goes_to_host(self, x: Tensor, layer: int) -> bool:
        large = int(x.numel()) * x.dtype.itemsize > LEAST_OFFLOADED_BYTES
        return self.offloads and large and (self.first_pass or layer < len(self.layers) - 1)

    def head(self, x: Tensor) -> Tensor:
        f = self.facts
        logits = self.lm_head(x)
        if f.scaled_logits:
            logits = logits / 8.0
        if f.logit_softcap:
            logits = torch.tanh(logits / f.logit_softcap) * f.logit_softcap
        return logits

    def logits(self, idx: Tensor) -> Tensor:
        return self.head(self.states(idx))

    def masks(self, B: int, T: int, like: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return the masks of layers without and with a window; None where causal attention needs none."""
        f = self.facts
        windows = T, f.sliding_window if f.sliding_layers else T
        padded = f.padded and not (self.training and self.build.fast_blocks)  # unsloth trains without such a mask
        needed = [f.written_attention or padded or window < T for window in windows]
        pairs = zip(windows, needed, strict=True)
        made = [window_mask(B, T, window, like) if need else None for window, need in pairs]
        if f.written_attention:  # added to the scores
            made = [None if mask is None else mask_as_bias(mask, like.dtype) for mask in made]
        return made[0], made[1] if f.sliding_layers else None

    def forward(self, idx: Tensor, labels: Tensor) -> Any:
        """Return the mean loss in nats of predicting labels, B x T, shifted left by one."""
        if self.tiled:
            return self.tiled_loss(idx, labels)
        states = self.states(idx)  # held until the loss is made, as transformers' output holds them
        kind = self.build.liger.loss if self.build.liger is not None else ""
        together = self.chunks or kind == "fused"
        if together and (self.training or not self.keeps_logits):  # the Trainer asks for `skip_logits`
            loss = self.chunked_loss(states, self.lm_head.weight, labels)
        elif self.chunks:
            loss = whole_loss(self.head(states), labels)
        else:
            logits = self.head(states)
            own = (liger.cross_entropy,) if kind == "cross_entropy" else ()
            loss = causal_loss(logits, labels, *own)
            if self.returns_logits:
                return loss, logits
        del states
        return loss

    def tiled_loss(self, idx: Tensor, labels: Tensor) -> Tensor:
        """Return TRL's loss, which runs the model once more where an evaluation wants logits."""
        f, turn = self.facts, self.turn()
        routed: list[Tensor] = []
        states = self.watched(idx, routed) if f.balanced else self.states(idx)
        loss, *logged = self.chunked_loss(states, self.lm_head.weight, self.lm_head.bias, labels, turn)
        if routed:
            mask = None if f.joined else labels.reshape(-1).to(torch.float32)  # as large as that of the batch
            loss = loss + balance(routed, f.experts_per_token, mask) * 0.001
        del states, routed, logged
        if self.keeps_logits and not self.training:
            self.logits(idx)
        return loss

    def turn(self) -> Turn:
        return Turn(1 / 8.0 if self.facts.scaled_logits else 1.0, self.facts.logit_softcap)

    def watched(self, idx: Tensor, routed: list[Tensor]) -> Tensor:
        routers = [block.mlp.gate for block in self.layers if isinstance(block.mlp, Mixture)]
        for router in routers:
            router.seen = routed
        states = self.states(idx)
        for router in routers:
            router.seen = None
        return states


def causal_loss(logits: Tensor, labels: Tensor, own: Callable[[Tensor, Tensor], Tensor] | None = None) -> Tensor:
    """Return transformers' ForCausalLMLoss: fp32 logits, labels shifted by one. `own`: another cross-entropy."""
    V = logits.shape[-1]
    logits = logits.float()
    labels = F.pad(labels, (0, 1), value=-100)
    shifted = labels[..., 1:].contiguous()
    if own is not None:
        return own(logits.view(-1, V), shifted.view(-1))
    return F.cross_entropy(logits.view(-1, V), shifted.view(-1), ignore_index=-100)
