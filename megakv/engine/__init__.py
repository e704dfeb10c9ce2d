"""The engine: made from a model and a config, asked for tokens, kept over turns."""
