"""A real PowerDNS server for tests, an HTTP proxy in front of it that fails on demand, and DNS queries."""
