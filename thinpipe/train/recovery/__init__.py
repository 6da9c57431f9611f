"""Recovery: a run with servers continues, exactly, after one of them is lost or leaves.

The protocol is two state machines without I/O. `coordinator.py` runs on the client and decides; `member.py` runs on
every worker. Drivers carry out their actions; the simulator of the tests drives the same code in virtual time.
"""
