"""Fuzzing of everything that reads what strangers send; see `__main__.py`."""
