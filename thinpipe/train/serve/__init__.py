"""Servers of a run that need no options: the desk protocol, the supervisor of `thinpipe serve`, and the client's side.

client: `thinpipe train ... --servers TICKET`                  server: `thinpipe serve --listen HOST:PORT`
or `thinpipe train ... --listen HOST:PORT --workers N`         or `thinpipe serve TICKET`
one process, worker 0: client.py                               supervisor.py, and a process per run: server_worker.py

(1)  one side listens, the other dials; both are authenticated          (comm/secure)
(2)  facts      versions, memory, devices of the server                 (desk.py)
(3)  offer      verb, settings, files and roster of the run; the server rejects it in one line, or starts a worker
(4)  probe      which servers reach each other; the others are relayed  (roster.py, relay.py)
(5)  start      the workers connect, and the run goes on as on machines that were started by hand
(6)  end        how the server's worker ended, if it was not the run's own end
"""
