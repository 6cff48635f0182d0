"""Logs as users give them: which reader takes one, and the figures of its report."""
