"""The plan of a form on several cards: the use case of `plan --gpus`."""

from foretrain.app.ranks.plan import make_cluster_plan
from foretrain.config.resolve import ResolvedConfig
from foretrain.hardware.cluster import cluster
from foretrain.predict.ranks.record import ClusterPlan
from foretrain.web import devices, planner


def made(asked: planner.Asked, found: ResolvedConfig) -> ClusterPlan:
    """The plan of a config on as many cards as the form says: what `plan --gpus` answers. Raises UserError."""
    target = devices.target(asked.gpu, asked.others, found.config)
    cards = cluster(str(planner.count(asked)), here=lambda: target.gpu)
    return make_cluster_plan(found, cards, target.used_by_others_bytes)
