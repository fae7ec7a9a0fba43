"""From the files that a ConfigMap has to those that are declared, so that no request meets a missing cluster. Pure.

A kubelet replaces all files of a mount at once, but Envoy reads each of them by itself, a new cluster serves only once
its names are resolved, and a removed one is gone at once. So where clusters come or go, a change takes up to three
steps, *make before break*:

1. clusters: the new ones beside the old ones; routes stay;
2. routes: once every serving Pod has the clusters;
3. clusters: the old ones go, once every serving Pod has the routes.

A change that adds and removes no cluster takes one, if every Pod has the clusters that there are. Which step is next
follows from the ConfigMap and from what the Pods say, so it is the same before and after a restart.
"""

from collections.abc import Callable, Mapping
from typing import Final

from operator_app.envoy import internal
from operator_app.envoy.files import MAX_BYTES, Files, clusters_of, version_of, with_clusters, with_texts

_CLUSTERS: Final = internal.CLUSTERS_STAT
_LISTENERS: Final = internal.LISTENERS_STAT

HaveLoaded = Callable[[Mapping[str, str]], bool]
"""Whether every serving Pod has loaded these versions, by the prefix of Envoy's statistics, or will not be waited for
any longer."""


def next_files(files: Files, live: Mapping[str, str], have_loaded: HaveLoaded, *, generation: int) -> Files:
    """The files to store next on the way to ``files``; ``files`` themselves when it is the last step.

    ``generation`` is that of the declaration. Old and new clusters together have a version of their own in each:
    otherwise an Envoy that has them from an earlier edit would seem to have read what was stored since, and might be
    about to read a file that lacks some.

    ``live`` are the texts in the ConfigMap, without those that another writer has changed. Files of old and new
    clusters that do not fit into a ConfigMap together are not waited for.
    """
    old = clusters_of(live.get(files.clusters_file, ""))
    new = clusters_of(files.texts[files.clusters_file])
    if old is None or new is None:
        return files
    both = with_clusters(files, {**old, **new}, generation) if old.keys() - new.keys() else files
    routes = {
        name: live[name]
        for stat, name in files.names.items()
        if stat not in (_CLUSTERS, _LISTENERS) and name in live and version_of(live[name])
    }
    if sum(map(len, (*both.texts.values(), *routes.values()))) > MAX_BYTES:
        return files
    before = with_texts(both, routes)
    if not new.keys() <= old.keys():
        return before
    if before.versions != both.versions:
        is_known = have_loaded({_CLUSTERS: version_of(live[files.clusters_file])})
        return both if is_known else before
    if both is files:
        return files
    return files if have_loaded(both.versions) else both
