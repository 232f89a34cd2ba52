"""Files that several programs read and write, and the digest of source files."""
