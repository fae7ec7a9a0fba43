"""Logs, metrics and the HTTP port that serves them."""
