"""What the commands share: options, progress bars, the verdict as text, errors, and the start."""
