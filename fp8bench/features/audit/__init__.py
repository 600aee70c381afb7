"""Guard: check that a kernel or converted model does what it promises."""
