"""The simulator that proves the lifecycle: seeded programs, a virtual clock, one checker a rule, planted bugs."""
