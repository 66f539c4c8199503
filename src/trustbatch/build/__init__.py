"""From a configuration to the parts of a run: policies, engines, and the session that holds all."""
