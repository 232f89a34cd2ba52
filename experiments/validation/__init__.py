"""Published figures as rows, their predictions by the policies, and a report of the errors."""
