"""EnvoyProxy spec to Envoy configuration. Pure."""
