"""DeepScaleR-Preview: competition problems to train on, from AIME and AMC to Olympiads."""

from dataclasses import dataclass
from typing import ClassVar

from trustbatch.tasks.hub import HubDataset
from trustbatch.tasks.problems import ProblemTask


@dataclass(frozen=True, kw_only=True)
class Deepscaler(ProblemTask):
    """40,315 problems on the hub; a local file may have a `difficulty` to choose by."""

    hub: ClassVar[HubDataset] = HubDataset(
        "agentica-org/DeepScaleR-Preview-Dataset", {"train": "deepscaler.json"}
    )

    name: str = "deepscaler"
