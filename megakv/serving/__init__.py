"""Requests of many, served by one sharded engine."""
