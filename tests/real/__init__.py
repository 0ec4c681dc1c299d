"""Real weights and a real recording, from registry packages: `make test-real`."""
