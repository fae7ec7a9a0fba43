"""Tests against a real Kubernetes API server, and what brings one up."""
