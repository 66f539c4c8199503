"""What drives the rest: the only code that knows the order of the stages."""
