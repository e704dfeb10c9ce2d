"""How attention enters an unmodified model: interfaces, hooks, and a policy per architecture."""
