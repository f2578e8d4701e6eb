"""Render a lesson's script to its page: split it into cells, run them, write Markdown, and compare pages."""
