"""How a lesson's script becomes its page: cut into cells, run, set as Markdown, compared with the last."""
