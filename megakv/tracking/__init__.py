"""What a run measures and where it goes: reports as JSON, metrics in CSV and W&B, a timeline picture, a trace."""
