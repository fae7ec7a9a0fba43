"""The registry that publishes hostnames through PowerDNS."""
