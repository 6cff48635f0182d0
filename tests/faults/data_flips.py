"""Damage to a prepared dataset: one bit, or the end of a file, in shards, index, tokenizer and an unfinished state."""
