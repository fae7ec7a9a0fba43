"""What the node says about a Pod: the Pod's ``status`` as a function of what its containers do. Pure.

Field meanings follow core/v1 ``PodStatus``. Readiness gates are not considered.
"""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from operator_app.api.kinds import Object

WAITING_TO_START = {"waiting": {"reason": "ContainerCreating"}}


@dataclass(slots=True)
class ContainerRecord:
    """What is known about one container; changed by whoever runs it.

    ``finished`` means that it has ended and will not be started again.
    """

    name: str
    image: str
    state: dict[str, Any] = field(default_factory=lambda: WAITING_TO_START)
    last_state: dict[str, Any] = field(default_factory=dict)
    container_id: str = ""
    restart_count: int = 0
    ready: bool = False
    started: bool = False
    finished: bool = False

    def status(self) -> dict[str, Any]:
        """The entry of ``containerStatuses``."""
        return {
            "name": self.name,
            "image": self.image,
            "imageID": self.image,
            "containerID": self.container_id,
            "state": self.state,
            "lastState": self.last_state,
            "restartCount": self.restart_count,
            "ready": self.ready,
            "started": self.started,
        }


def timestamp(at: datetime) -> str:
    """The wire format of ``metav1.Time``: UTC, whole seconds."""
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")


def phase(records: list[ContainerRecord]) -> str:
    """Pending until every container has run once; Succeeded or Failed when none will run again."""
    if all(record.finished for record in records):
        codes = [record.state["terminated"]["exitCode"] for record in records]
        return "Failed" if any(codes) else "Succeeded"
    never_ran = any("waiting" in record.state and not record.last_state for record in records)
    return "Pending" if never_ran else "Running"


def pod_status(
    records: list[ContainerRecord], previous: Object, *, pod_ip: str, host_ip: str, started_at: datetime, now: datetime
) -> Object:
    """The fields of ``status`` that a node owns, for a strategic merge.

    ``previous`` is the status sent before: a condition's ``lastTransitionTime`` moves only when its ``status`` flips.
    """
    unready = [record.name for record in records if not record.ready]
    why = {"reason": "ContainersNotReady", "message": f"containers with unready status: [{' '.join(unready)}]"}
    conditions = {
        "PodScheduled": (True, {}),
        "PodReadyToStartContainers": (bool(pod_ip), {}),
        "Initialized": (True, {}),
        "ContainersReady": (not unready, why if unready else {}),
        "Ready": (not unready, why if unready else {}),
    }
    before = {condition["type"]: condition for condition in previous.get("conditions", ())}
    written = []
    for name, (holds, explanation) in conditions.items():
        value = "True" if holds else "False"
        same = before.get(name, {}).get("status") == value
        since = before[name]["lastTransitionTime"] if same else timestamp(now)
        # A strategic merge keeps what is not mentioned, so an explanation that no longer holds is set to null.
        cleared = {"reason": None, "message": None}
        written.append({"type": name, "status": value, "lastTransitionTime": since, **cleared, **explanation})
    addresses = {"podIP": pod_ip, "podIPs": [{"$patch": "replace"}, {"ip": pod_ip}]} if pod_ip else {}
    return {
        "phase": phase(records),
        "conditions": written,
        "containerStatuses": [record.status() for record in records],
        "startTime": timestamp(started_at),
        "hostIP": host_ip,
        **addresses,
    }
