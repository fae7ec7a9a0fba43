"""The registry of DNS servers that take dynamic updates (RFC 2136), signed with a shared key (TSIG, RFC 8945)."""
