"""Requests through a running Envoy: what each feature of a spec does to them."""
