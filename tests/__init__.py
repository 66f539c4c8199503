"""A package of its own name, since verl installs another top-level package called tests."""
