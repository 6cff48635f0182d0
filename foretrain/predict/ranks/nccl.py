"""What NCCL takes on a card beside PyTorch's allocator: buffers of its channels, for each communicator.

A range that others have published; nothing of it is measured here. It hangs on the link, since NCCL opens as many
channels as the link can feed, on NCCL's version, and on which collectives ran:

* cards on PCIe: 0.3 to 0.7 GB (pairs; NVIDIA/nccl#964 has 544 MB for two ranks, 688 MB for more).
* NVLink: 544 MB for two A100 (#964) to 1.6 GB (#864).
* NVLink whose switch sums (NVLS): 1.06 GB on eight H100, 4.34 GB after the first all-to-all (#1685); the early records
  of modded-nanogpt had about 3.4 to 4.3 GB beside model, buckets and context before their first step.

Expected is the middle: nobody knows better.
"""

from foretrain.base.records import Record
from foretrain.hardware.cluster import Cluster
from foretrain.hardware.context import Context
from foretrain.model.ranks.sharing import Sharing

PCIE_BYTES = 300_000_000, 700_000_000
NVLINK_BYTES, SWITCH_BYTES = (544_000_000, 1_600_000_000), (1_060_000_000, 4_340_000_000)
LEAST_SWITCHED = 3  # ranks: two have nothing to gain from a sum in the switch


class NcclMemory(Record):
    """Bytes of all communicators of a rank. An estimated range: published, not measured on these cards."""

    low_bytes: int
    expected_bytes: int
    high_bytes: int

    @classmethod
    def of(cls, cluster: Cluster, sharing: Sharing) -> "NcclMemory":
        """One communicator for all ranks; HSDP has one more between nodes, which is as large at most."""
        low, high = PCIE_BYTES
        if cluster.link.kind == "nvlink":
            switched = cluster.link.switch_share and cluster.per_node >= LEAST_SWITCHED
            low, high = SWITCH_BYTES if switched else NVLINK_BYTES
        most = 2 if sharing.way.replicates else 1
        return cls(low_bytes=low, expected_bytes=(low + most * high) // 2, high_bytes=most * high)

    def beside(self, context: Context) -> Context:
        """All that a rank takes on a card beside the allocator: its context, and NCCL's memory."""
        names = ("low_bytes", "expected_bytes", "high_bytes")
        return context.model_copy(update={name: getattr(context, name) + getattr(self, name) for name in names})
