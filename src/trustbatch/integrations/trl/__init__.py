"""P3O and the other objectives in TRL.

    from trustbatch.integrations.trl import P3OTrainer       # instead of trl.GRPOTrainer

`AsyncP3OTrainer` is TRL's experimental asynchronous trainer; `TrustCallback` measures an unchanged
GRPOTrainer. They override private methods of TRL, so its version matters.
"""

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

TRL_VERSION = "1.16"

try:
    _installed = version("trl")
except PackageNotFoundError as error:
    raise ImportError(
        "trustbatch.integrations.trl needs TRL, which is not installed: "
        "pip install 'trustbatch[trl]'."
    ) from error
if not _installed.startswith(f"{TRL_VERSION}."):
    raise ImportError(
        f"trustbatch.integrations.trl works with TRL {TRL_VERSION}, and {_installed} is installed: "
        "pip install 'trustbatch[trl]'."
    )

from trustbatch.integrations.trl.callback import TrustCallback  # noqa: E402
from trustbatch.integrations.trl.trainer import P3OTrainer  # noqa: E402

if TYPE_CHECKING:
    from trustbatch.integrations.trl.async_trainer import AsyncP3OTrainer

__all__ = ["AsyncP3OTrainer", "P3OTrainer", "TrustCallback"]


def __getattr__(name: str) -> Any:
    # TRL warns when an experimental trainer is imported
    if name == "AsyncP3OTrainer":
        from trustbatch.integrations.trl.async_trainer import AsyncP3OTrainer

        return AsyncP3OTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
