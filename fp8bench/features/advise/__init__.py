"""What to do about a precision here: adopt it, leave layers or steps high, or nothing, because."""
