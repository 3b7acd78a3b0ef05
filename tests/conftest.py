"""One numeric thread: several test processes share few cores, where threads of OpenBLAS wait for each other by spinning
(measured: 36 s instead of 1 s). Read when NumPy is first imported, so it stands before all other modules of tests."""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
