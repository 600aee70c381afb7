"""Commands and families of commands that the core never imports: a folder each, told from top to bottom."""
