"""From a dataset's record to what reads its tokens: one reader, or one for each part of a mixture. No numpy."""

from pathlib import Path

from foretrain.data.dataset import DatasetInfo
from foretrain.data.token_layout import read_layout
from foretrain.data.token_reader import Fetch, TokenReader


def readers(info: DatasetInfo, split: str, *, verify: bool = True) -> list[TokenReader]:
    """The readers of a split, in the order of the parts. Raises UserError 'data.…'."""
    if info.parts:
        return [reader for part in info.parts for reader in readers(part.dataset, split, verify=verify)]
    layout = read_layout(Path(info.path), info.dtype, present=info.remote is None)
    return [TokenReader(layout.splits[split], verify=verify, fetch=fetch_of(info))]


def fetch_of(info: DatasetInfo) -> Fetch | None:
    """What brings a shard that is not here; None for a dataset of this machine."""
    if info.remote is None:
        return None
    from foretrain.data.remote import fetch_shard

    remote = info.remote
    return lambda segment: fetch_shard(remote, segment)
