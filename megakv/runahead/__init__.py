"""How a prompt is cut for the chain of KV-Runahead: partitions, their search, the lookup table."""
