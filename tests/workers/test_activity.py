"""What a heartbeat says of a worker."""

import threading
import time

from thinpipe.workers.activity import Activity


def test_a_thread_that_spins_beside_a_waiting_worker_is_no_work() -> None:
    before, stop = Activity().status()["cpu_s"], threading.Event()

    def spin() -> None:
        until = time.thread_time() + 0.3
        while time.thread_time() < until:
            pass
        stop.set()

    thread = threading.Thread(target=spin)
    thread.start()
    assert stop.wait(60)
    thread.join()
    assert Activity().status()["cpu_s"] - before < 0.1


def test_what_the_worker_computes_is() -> None:
    before = Activity().status()["cpu_s"]
    until = time.thread_time() + 0.2
    while time.thread_time() < until:
        pass
    assert Activity().status()["cpu_s"] - before >= 0.2
