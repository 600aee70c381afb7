"""Guard: fail a build if something got worse."""
