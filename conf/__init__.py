"""Every default of a run, as hydra groups; a package so that it is installed."""
