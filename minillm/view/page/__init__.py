"""What the browser page is made of: a trace as the data it reads, and its own HTML, CSS and JavaScript."""
