"""Train a model in several precisions side by side: does it still learn?"""
