"""Recovery of a run that has lost a server: the protocol as state machines, and what carries out their actions."""
