"""A small model and data set that a first run can use: made on this machine on first use, then cached.

`ensure("tiny:sort")` gives the paths of a real Hugging Face folder and real JSONL files, which everything else treats
like any other model and data. Talks to the cache directory, and starts `python -m busrl.quickstart` when something
has to be made. Knows nothing of runs, rings or the bus; importing it imports no torch.
"""

from busrl.quickstart.cache import Paths, ensure, paths
from busrl.quickstart.task import RECIPES, Recipe

__all__ = ["RECIPES", "Paths", "Recipe", "ensure", "paths"]
