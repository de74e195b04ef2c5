"""The trace: step records on disk, written, read, checked, summarised and exported."""
