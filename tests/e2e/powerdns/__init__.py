"""A real PowerDNS server for tests, a proxy in front of it that fails on demand, and a DNS query to ask it."""
