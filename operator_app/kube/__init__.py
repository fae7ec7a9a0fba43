"""The Kubernetes API server: client, watches, the store of what they deliver, and Events."""
