"""The parts of the browser page: the trace as JSON data, and the page's HTML, CSS and JavaScript."""
