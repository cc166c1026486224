"""Lies beside the test and is declared by no target of it."""
