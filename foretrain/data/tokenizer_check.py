"""The tokenizer of a dataset, held against its index: other files beside the shards would decode other text."""

import hashlib
import json
from typing import Any

from foretrain.base.errors import UserError
from foretrain.data import tokenizer as tokenizers
from foretrain.data.dataset import DatasetInfo
from foretrain.data.tokenizer import JsonTokenizer, TiktokenTokenizer, Tokenizer


def digest_of(tokenizer: Tokenizer) -> str:
    """SHA-256 over what decides the ids: vocabulary, pattern, special tokens."""
    digest = hashlib.sha256(tokenizer.name.encode())
    if isinstance(tokenizer, JsonTokenizer):
        digest = hashlib.sha256(json.dumps(json.loads(tokenizer.text), sort_keys=True).encode())
    elif isinstance(tokenizer, TiktokenTokenizer):
        encoding: Any = tokenizer._encoding
        digest.update(json.dumps([encoding._pat_str, encoding._special_tokens], sort_keys=True).encode())
        for token, rank in sorted(tokenizer.ranks.items(), key=lambda item: item[1]):
            digest.update(b"%d %d " % (rank, len(token)) + token)
    return digest.hexdigest()


def tokenizer_of(info: DatasetInfo) -> Tokenizer | None:
    """The tokenizer that made a dataset's ids; None where its files do not say which it was.

    Raises UserError 'data.other_tokenizer' where the files beside the shards are of another one, or damaged.
    """
    found = tokenizers.load(info.tokenizer_folder, info.tokenizer)
    if found is not None and info.tokenizer_sha256 is not None and digest_of(found) != info.tokenizer_sha256:
        raise UserError("data.other_tokenizer", path=str(info.tokenizer_folder))
    return found
