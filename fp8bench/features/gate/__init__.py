"""Guard: fail a build where something has become worse."""
