"""A run's topology: what `topology.toml` says, checked and frozen.

`load(path, overrides)` reads a hand-written file with line numbers in its errors, `sketch` one that is only simulated;
`recorded` reads the resolved one of a run directory; `materialise` replaces `tiny:` names by paths. Which
names the tables have is said in `schema`, and nowhere else. Knows nothing of the roles or of torch.
"""

from busrl.topology import schema
from busrl.topology.files import model_folder
from busrl.topology.load import Sketch, load, recorded, sketch
from busrl.topology.schema import *  # noqa: F403
from busrl.topology.tiny import materialise

__all__ = ["Sketch", "load", "materialise", "model_folder", "recorded", "sketch"]
__all__ += schema.__all__
