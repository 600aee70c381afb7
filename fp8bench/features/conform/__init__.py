"""Whether native casts and products give what their emulation gives, bit by bit."""
