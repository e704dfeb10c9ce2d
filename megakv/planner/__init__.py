"""Plans before a run: meshes and methods for a model on some machines, dry runs, and measured profiles."""
