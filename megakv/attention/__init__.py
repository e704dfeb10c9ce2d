"""Attention over ranks: one file per method, the partial attention beneath them, and the choice between them."""
