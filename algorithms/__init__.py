"""Published collectives as pure functions from a rank count to a schedule. Import as ``commrt.algorithms``."""
