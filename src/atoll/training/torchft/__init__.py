"""torchft's `DiLoCo` and `LocalSGD` over a store: `Manager` takes the place of torchft's own manager."""

from atoll.training.torchft.manager import Manager as Manager
from atoll.training.torchft.manager import MockManager as MockManager
