"""Two interpreters or two revisions, in the same rounds."""
