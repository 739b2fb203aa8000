"""The report of a run: one HTML file, made of the events of its log."""
