"""Values of options that several verbs take, checked while the command line is read. Knows nothing of the verbs."""

from __future__ import annotations

import argparse
import math


def positive(text: str) -> float:
    """The value of an option that is a time or a size."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: expected a number above 0")
    return number
