"""Published figures against what the policies predict of them: the rows, their predictions, and the report."""
