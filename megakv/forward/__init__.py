"""One pass of a model over the ranks: what is planned, what it keeps, and how a layer attends."""
