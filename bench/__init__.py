"""The benchmark: the server against the bare loop, on this machine, in one run (`python -m bench`)."""
