"""The demo's scenes through a real engine: one file an engine, each with `run`."""
