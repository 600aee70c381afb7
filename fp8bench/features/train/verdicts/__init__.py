"""How well each precision learns: verdicts, curves, speed to a loss, and other ways of delayed scaling."""
