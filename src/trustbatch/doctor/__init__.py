"""The doctor: is this stack on-policy, and if not, what differs?

Reading order: distributions, examined_tokens, recompute, search, arithmetic, sampling, probe,
examine, findings, verdict, diagnose.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trustbatch.doctor.diagnose import Diagnosis


class _Doctor(ModuleType):
    """`trustbatch.doctor` is this package and also a function, as `trustbatch.train` is one."""

    def __call__(self, config: Any = None, *, rollouts: Any = None, **options: Any) -> "Diagnosis":
        """Diagnose the stack of a configuration, or the rollouts=FILE of another engine's model."""
        if rollouts is not None:
            from trustbatch.doctor.rollouts.diagnose import diagnose_rollouts

            return diagnose_rollouts(rollouts, **options)
        from trustbatch.doctor.diagnose import diagnose

        return diagnose(config, **options)


sys.modules[__name__].__class__ = _Doctor
