"""Models that are evaluated: a run's own, and one of Hugging Face's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretrain.base.errors import UserError
from foretrain.base.later import Later
from foretrain.evaluation.libraries import first_line
from foretrain.model.language_model import LanguageModel

_transformers: Any = Later("transformers")


class OwnModel:
    """A model of foretrain's."""

    def __init__(self, model: LanguageModel, vocab_size: int) -> None:
        self.model = model.eval()
        self.context_tokens = model.block_size
        self.vocab_size = vocab_size
        self.device = next(model.parameters()).device

    def logits(self, idx: Tensor) -> Tensor:
        """B x T x V, fp32."""
        return self.model.lm_head(self.model.hidden(idx)).float()


class HubModel:
    """A causal language model of transformers', in single precision."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        """Raises UserError where transformers cannot load the folder. Weights are read from safetensors only."""
        load = _transformers.AutoModelForCausalLM.from_pretrained
        try:
            model = load(str(folder), dtype=torch.float32, use_safetensors=True, local_files_only=True)
        except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
            raise UserError("data.bad_hf_folder", path=str(folder), reason=first_line(error)) from None
        self.model: Any = model.to(device).eval()
        self.context_tokens = int(getattr(model.config, "max_position_embeddings", None) or 2048)
        self.vocab_size = int(model.config.vocab_size)
        self.device = device

    def logits(self, idx: Tensor) -> Tensor:
        """B x T x V, fp32."""
        return self.model(input_ids=idx, use_cache=False).logits.float()
