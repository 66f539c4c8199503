"""Memory of one GPU (of the machine, where there is none), by phase and by part."""

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Part:
    """Something that takes memory."""

    name: str
    num_bytes: float
    is_elastic: bool = False
    """whether the run goes on, more slowly, where there is less"""


@dataclass(frozen=True)
class Phase:
    """The moment of a phase at which it takes most memory."""

    name: str
    """generate or train"""
    parts: tuple[Part, ...]

    @property
    def total(self) -> float:
        """Bytes of all parts, as torch counts what is allocated."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def needed(self) -> float:
        """Bytes without which the phase can't run."""
        return sum(part.num_bytes for part in self.parts if not part.is_elastic)


@dataclass(frozen=True)
class MemoryPlan:
    """What a run takes, and what there is."""

    phases: tuple[Phase, ...]
    capacity: float
    """bytes that torch can have"""
    is_gpu: bool
    num_gpus: int
    prompt_tokens: int
    is_prompt_assumed: bool
    """whether the tokenizer could not be asked"""

    def phase(self, name: str) -> Phase:
        """Return the phase of that name."""
        return next(phase for phase in self.phases if phase.name == name)

    @property
    def needed(self) -> float:
        """Bytes without which the run fails."""
        return max(phase.needed for phase in self.phases)

    @property
    def fits(self) -> bool:
        """Whether the run has what it needs."""
        return self.needed <= self.capacity


def size(num_bytes: float) -> str:
    """Return a number of bytes as people read it."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.1f} MiB"
