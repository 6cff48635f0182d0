"""Hugging Face TRL on the console: the Trainer's dictionaries, with tokens, their accuracy and the entropy.

`{'loss': 2.2344, 'grad_norm': 17.139, 'learning_rate': 0.0, 'num_tokens': 51486.0, 'mean_token_accuracy': 0.5436, …}`.
"""

from dataclasses import replace
from functools import partial

from foretrain.monitoring.formats import trainer

_KEYS = ("num_tokens", "mean_token_accuracy", "entropy", "rewards/margins", "rewards/chosen", "reward", "kl")
FORMATS = (
    replace(trainer.FORMATS[0], name="trl", title="TRL", place=55, reader=partial(trainer.Dictionaries, keys=_KEYS)),
)
