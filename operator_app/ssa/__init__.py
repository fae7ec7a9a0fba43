"""Server-side apply: what ``managedFields`` says, without I/O."""
