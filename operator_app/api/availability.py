"""What an EnvoyProxy's spec says of how many proxies run, through evictions and load. Pure."""

from typing import Annotated, ClassVar

from pydantic import Field

from operator_app.api.fields import Int32
from operator_app.api.rules import ApiModel, Rule


class Disruption(ApiModel):
    """How many proxies a drain of nodes may take at the same time: a PodDisruptionBudget."""

    max_unavailable: Annotated[Int32, Field(ge=1, le=100)] = 1
    """Proxies that evictions may take away at the same time, 1 to 100. A proxy that is not ready may always be
    evicted."""


class Autoscaling(ApiModel):
    """Runs as many proxies as their CPU load needs: a HorizontalPodAutoscaler, which then owns the number."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="self.minReplicas <= self.maxReplicas",
            message="minReplicas must not be above maxReplicas: raise maxReplicas or lower minReplicas",
            is_valid=lambda autoscaling: autoscaling.min_replicas <= autoscaling.max_replicas,
            field=".minReplicas",
        ),
    )

    min_replicas: Annotated[Int32, Field(ge=1, le=100)] = 1
    """Fewest proxies, 1 to 100."""

    max_replicas: Annotated[Int32, Field(ge=1, le=100)]
    """Most proxies, 1 to 100."""

    target_cpu_utilization_percentage: Annotated[
        Int32, Field(ge=1, le=1000, alias="targetCPUUtilizationPercentage")
    ] = 80
    """CPU use at which proxies are added, in percent of resources.requests.cpu, 1 to 1000."""
