"""Tokenizes rows, and stores the token ids and the targets in a cache file."""
