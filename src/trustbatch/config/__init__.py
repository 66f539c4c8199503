"""The configuration: one tree of tables, checked before anything is loaded.

Each table's class is beside what it configures; those of packages above this one are here.
"""

from trustbatch.config.loading import apply_override, as_config, load_config, parse_config
from trustbatch.config.tree import Config

__all__ = ["Config", "apply_override", "as_config", "load_config", "parse_config"]
