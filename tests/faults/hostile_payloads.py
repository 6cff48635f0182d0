"""Payloads for readers of foreign files."""
