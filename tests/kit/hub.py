"""Models of transformers, built from a config.json on a device that has no memory."""

from typing import Any


def transformers_config(config: dict[str, Any]) -> Any:
    """The config that transformers makes of a config.json; a vocabulary of 128 has none of its special tokens."""
    from transformers import AutoConfig

    own = {key: value for key, value in config.items() if key != "model_type"}
    if own.get("vocab_size", 1000) < 1000:
        own |= {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    return AutoConfig.for_model(config["model_type"], **own)


def named_shapes(config: dict[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of what transformers builds from a config.json, on a device that has no memory."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(transformers_config(config))
    model.tie_weights()
    return [(name, tuple(each.shape)) for name, each in model.named_parameters()]


def counted(config: dict[str, Any]) -> int:
    """The parameters of the whole model that transformers builds, with the tower of one that reads pictures."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    made = transformers_config(config)
    kind = AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
    with torch.device("meta"):
        model = kind.from_config(made)
    model.tie_weights()
    return sum(each.numel() for each in model.parameters())
