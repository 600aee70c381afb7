"""Commands and families of commands that the core never imports: a folder for each, readable from top to bottom."""
