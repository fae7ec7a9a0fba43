"""Which replica reconciles which namespaces: hashing, Leases, election."""
