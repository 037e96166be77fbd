"""One folder per operation: ``api.py`` validates and dispatches, the backends beside it are private."""
