"""Guard: measure two revisions or interpreters in the same rounds."""
