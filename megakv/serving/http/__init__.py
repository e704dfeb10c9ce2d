"""OpenAI's endpoints, a page and metrics over a serving loop: for strangers, with limits before any work."""
