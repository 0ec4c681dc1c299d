"""Every family's rows against the model in one piece: `python -m tests.parity --json`."""
