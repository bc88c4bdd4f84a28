"""Tools: what a request offers a model, how models write calls of them, and how calls are found in an answer."""
