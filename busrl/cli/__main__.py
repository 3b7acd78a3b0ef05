"""`python -m busrl.cli` is `busrl`."""

import sys

from busrl.cli.command import main

sys.exit(main())
