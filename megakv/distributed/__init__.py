"""The ranks: who they are, what they send each other, what they decide and how they fail together."""
