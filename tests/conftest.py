"""Set before torch is imported: two test processes on two cores have one thread each, or they wait for each other."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
