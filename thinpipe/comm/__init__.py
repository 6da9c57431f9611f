"""Communication between processes: the one seam through which everything crosses from worker to worker.

what crosses                                    through
tensors of a pipeline                           links/transport.py: isend and irecv in the process group of a stage
gradients of replicas                           ddp.py: torch's DDP and its hooks, in a process group
statistics, JSON, checkpoints, captures,        group.py: ``Group``, in host memory (``World.control``)
clock pings, the ring of generation, model files
heartbeats, the cause of a run's end            control.py: one TCP connection from the client to each worker
addresses, the secret of the control channel    rendezvous.py: torch's store, a file on one machine, else TCP

Process groups are created in two places: ``membership`` makes the default one with the user's backend, and
``backend.new_group`` all others. Code asks a backend for its capabilities (backend.py), not for its name; a group that
would bypass encryption is an error. With servers (``membership.joined_mesh``) all rows of the table travel through the
channels of ``secure``, and there is no rendezvous. Nothing else may name torch.distributed (tests/test_layering.py).
"""
