"""The families of models, by the value of `recipe`: one file each. No torch."""

from foretrain.config.families.family import Family
from foretrain.config.families.llama import Llama
from foretrain.config.families.modern import Modern
from foretrain.config.families.nanochat import NanoChat
from foretrain.config.families.nanogpt import NanoGPT
from foretrain.config.options import RunConfig

FAMILIES: dict[str, Family] = {family.name: family for family in (NanoGPT(), Modern(), NanoChat(), Llama())}


def family_of(config: RunConfig) -> Family:
    return FAMILIES[config.recipe]
