"""From files and overrides to one checked configuration, and its documentation."""
