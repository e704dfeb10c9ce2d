"""Errors, files, devices and the plain types that rooms hand each other; it imports nothing else of megakv."""
