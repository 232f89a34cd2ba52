"""What figures share: their style, their tables, their kinds of picture, and the stored results."""
