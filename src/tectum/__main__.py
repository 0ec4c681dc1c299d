"""`python -m tectum` is `tectum`."""

from tectum.cli import main

main()
