"""Published collectives as pure functions from a rank count to a schedule; import them as ``commrt.algorithms``."""
