"""Runs several ranks (processes of one distributed run) as one worker. A launcher starts them, each gets every
request, and their answers are merged.
"""
