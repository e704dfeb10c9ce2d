"""The sharded KV cache and what it holds."""
