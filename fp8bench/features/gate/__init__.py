"""Fail a build where something has become worse."""
