"""Render lessons: split a script into cells, run the cells, write their Markdown page, and compare pages."""
