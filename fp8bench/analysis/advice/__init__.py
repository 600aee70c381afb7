"""What to do about a precision on this machine: rules over what was measured, and what follows from their answers."""
