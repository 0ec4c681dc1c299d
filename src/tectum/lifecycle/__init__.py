"""THE RULES: what may happen to a request and what follows. Pure: no asyncio, no torch, no I/O, no clock of its own."""
