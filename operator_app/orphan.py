"""Letting a child go: it runs on as it is, belongs to nobody, and the garbage collector has no claim on it.

This write to a child is no apply. An apply without the owner reference would have to repeat every other
field of the child, and what is declared at the moment of a deletion need not be what runs; an empty one would take
everything away that nobody else owns. So a patch, pinned to the version that was read, removes our reference and
the two labels by which the operator knows its own. Whoever applies the child next takes the rest over by force.
"""

from operator_app.api.kinds import LABEL_MANAGED_BY, LABEL_OWNER_UID, Kind, Object, key_of
from operator_app.kube.client import Cluster


async def orphan_child(cluster: Cluster, kind: Kind, live: Object) -> None:
    """Make ``live``, whose controller the proxy is, nobody's.

    Raises ``ConflictError`` when it is not at this version any more.
    """
    metadata = live["metadata"]
    others = [each for each in metadata["ownerReferences"] if not each.get("controller")]
    pinned = {"uid": metadata["uid"], "resourceVersion": metadata["resourceVersion"]}
    labels = dict.fromkeys((LABEL_MANAGED_BY, LABEL_OWNER_UID))
    patch = {"metadata": pinned | {"ownerReferences": others or None, "labels": labels}}
    await cluster.merge_patch(kind, key_of(live), patch)
