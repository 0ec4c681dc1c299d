"""Content key → rows: how content is named (`key`), what is kept of it (`store`), and who works on it now (`flights`)."""
