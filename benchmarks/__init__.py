"""Measurements: each compares two things in one run and prints a table. Nothing here is a test."""
