"""How benchmarks start processes, alike for us and for peers."""

import os

# Open MPI refuses root without these.
os.environ.setdefault("OMPI_ALLOW_RUN_AS_ROOT", "1")
os.environ.setdefault("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")


def mpirun(ranks):
    """-> the words before the program: processes of this machine, not bound to cores."""
    return ["mpirun", "-n", str(ranks), "--oversubscribe", "--bind-to", "none"]
