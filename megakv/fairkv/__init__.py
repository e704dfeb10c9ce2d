"""Per-head budgets: compression, a ragged cache, and a placement of heads on ranks that leaves none waiting."""
