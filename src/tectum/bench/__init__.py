"""Load on a running encoder server, from processes of its own: `tectum bench URL`. Needs the base install, and Pillow.

`plan` says what is sent, `pictures` makes it, `link` carries it, `protocols` knows what a request looks like, `generator` is
the process that sends, `slow` the server behind slow URLs, `run` starts them all and adds up, `report` shows it.
"""
