"""A real BIND 9 as the primary server of zones, for tests of the registry of dynamic updates."""
