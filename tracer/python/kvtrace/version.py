"""The version, and what it runs with."""

__version__ = "0.1.0"
PRODUCER = f"kvtrace {__version__}"
OLDEST_TRANSFORMERS = (5, 1)
