"""The studies: each a function from a scale to what is compared there.

To add one, write a file with such a function and name it in `DEFINITIONS`.
"""

from collections.abc import Callable, Mapping

from trustbatch.studies.definitions.asynchronous import asynchronous
from trustbatch.studies.definitions.clip import clip
from trustbatch.studies.definitions.deaths import deaths
from trustbatch.studies.definitions.fp8 import fp8
from trustbatch.studies.definitions.kl import kl
from trustbatch.studies.definitions.mixing import mixing
from trustbatch.studies.definitions.stress import stress
from trustbatch.studies.definitions.temperature import temperature
from trustbatch.studies.definitions.trust import trust
from trustbatch.studies.definitions.two_anchor import two_anchor
from trustbatch.studies.scales.scale import Scale
from trustbatch.studies.study import Study

DEFINITIONS: Mapping[str, Callable[[Scale], Study]] = {
    "clip": clip,
    "temperature": temperature,
    "fp8": fp8,
    "async": asynchronous,
    "mixing": mixing,
    "two_anchor": two_anchor,
    "kl": kl,
    "stress": stress,
    "deaths": deaths,
    "trust": trust,
}
"""those that train; `benchmarks` evaluates what one of them has trained"""

__all__ = ["DEFINITIONS"]
