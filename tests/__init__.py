"""Tests, as the specification of the operator."""
