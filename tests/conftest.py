"""One numeric thread: several test processes share few cores, where threads of OpenBLAS wait for each other by spinning
(measured: 36 s instead of 1 s). Read when NumPy is first imported, so it stands before all other modules of tests.

Property tests try the same examples every time, so that a change is judged by what it changed; those of `make test-all`
are new in each run (HYPOTHESIS_PROFILE=explore), and what they find becomes an example in the test.
"""

import contextlib
import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

with contextlib.suppress(ImportError):  # the environment of vLLM has no hypothesis, and its tests need none
    from hypothesis import settings

    settings.register_profile("same", derandomize=True)
    settings.register_profile("explore")
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))
