"""Guard: fail a build if something has become worse."""
