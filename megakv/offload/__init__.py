"""Keys and values kept off the accelerator: tiers, the link to them, and what is recomputed while the rest comes."""
