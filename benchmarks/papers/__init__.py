"""The papers' published numbers, and the cost model's predictions of them."""
