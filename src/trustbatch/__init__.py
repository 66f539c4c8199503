"""trustbatch: RL on language models whose trust in a batch is measured from the batch.

The reading order of the package is the flow of data: tasks, rollout, rewards, advantages, batching,
objectives, training; `loops/train.py` is the loop that shows all stages on one screen.
"""

import importlib
import logging
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trustbatch.api import RunResult, evaluate, inspect, report, train
    from trustbatch.doctor.diagnose import diagnose as doctor

# OpenMP's threads spin for milliseconds while they wait, which beside another busy process made
# training ten times slower; a short spin costs nothing on an idle machine. It takes effect where
# torch is imported after this package.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

# PEFT imports torchao and bitsandbytes where they are installed, which warn about kernels of other
# machines that they can't load, and about themselves
for _name in ("bitsandbytes", "torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)

__version__ = "0.1.0"
__all__ = ["RunResult", "__version__", "doctor", "evaluate", "inspect", "report", "train"]


def __getattr__(name: str) -> Any:
    # torch takes seconds to import: `trustbatch --help` and a typing error must not wait for it
    if name == "doctor":
        return importlib.import_module("trustbatch.doctor")  # the package is the function
    if name in __all__:
        from trustbatch import api

        return getattr(api, name)
    raise AttributeError(f"module 'trustbatch' has no attribute {name!r}")
