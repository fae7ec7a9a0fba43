"""Which proxy is reconciled when, and by how many workers."""
