"""Processes for code that may hang, crash or take all memory: verifiers, and environments with several turns.

    run ── supervisor ── fork server ── worker, worker, …

A *worker* answers calls, one at a time, and may keep state between them; the run can kill it at any time. A *fork
server* is a single-threaded process with the user's code loaded, from which workers can be forked at any time. The run
itself, with its threads and its GPU, cannot fork them. Forking passes on closures and open files. The *supervisor*,
which the run forks once, early, runs no user code, so it can fork a clean fork server when one dies.

Each of them adopts orphans among its descendants: whatever a worker starts, even a daemon, is killed with the worker
or after it. Messages from workers are data: they are length-limited, numbered and never unpickled.
"""

from dapo_rl.workers.pool import WorkerClient, WorkerFailedError, WorkerGoneError, WorkerPool
from dapo_rl.workers.supervisor import Supervisor
from dapo_rl.workers.worker import Service

__all__ = ["Service", "Supervisor", "WorkerClient", "WorkerFailedError", "WorkerGoneError", "WorkerPool"]
