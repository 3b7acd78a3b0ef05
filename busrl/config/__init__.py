"""A run's topology: what `topology.toml` says, checked and frozen.

`load(path, overrides)` reads a hand-written file with line numbers in its errors, `sketch` one that is only simulated;
`recorded` reads the resolved one of a run directory; `materialise` replaces `tiny:` names by paths. Which
names the tables have is said in `schema`, and nowhere else. Knows nothing of the roles or of torch.
"""

from busrl.config import schema
from busrl.config.files import model_folder
from busrl.config.load import Sketch, load, materialise, recorded, sketch
from busrl.config.schema import *  # noqa: F403

__all__ = ["Sketch", "load", "materialise", "model_folder", "recorded", "sketch"]
__all__ += schema.__all__
