"""The operator's settings: one class, read from ``OPERATOR_APP_*`` and from the flags of ``run``."""

from typing import Annotated

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """Every setting has its unit in its name and a default that suits a cluster of thousands of proxies."""

    model_config = SettingsConfigDict(env_prefix="OPERATOR_APP_", frozen=True, extra="ignore")

    namespace: Annotated[str, Field(description="The operator's own namespace; registry records are kept there.")] = (
        "edge-system"
    )
    image: Annotated[str, Field(description="Envoy image of proxies whose spec names none.")] = (
        "envoyproxy/envoy:distroless-v1.36.2"
    )
    http_port: Annotated[int, Field(ge=0, le=65535, description="Port of /healthz, /readyz and /metrics.")] = 8080
