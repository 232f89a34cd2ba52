"""One run as one static HTML file: its text, its pictures' data, style and script, all inline."""
