"""Environments that come with the package and need no download."""
